//! A TCP proxy on a link, which a test can cut, silence or slow down while traffic flows.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What the link does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// Everything passes.
    Open,
    /// Connections are taken, nothing passes in either direction, nobody is told.
    BlackHole,
    /// What clients send passes; the answers are lost. A connection that lost one stays without answers.
    RepliesLost,
    /// So many bytes a second in each direction.
    Throttled(u32),
}

/// A proxy on a loopback port of its own; ends when dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    link: watch::Sender<Link>,
    /// Counts resets; each connection that was open when it changed is cut.
    resets: watch::Sender<u64>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// Listens, and hands each connection on to `target`, which is `HOST:PORT`.
    ///
    /// # Panics
    /// If there is no free port.
    pub async fn to(target: &str) -> Self {
        Self::at("127.0.0.1:0", target).await
    }

    /// The same on this address, for a server that tells its clients where to come.
    ///
    /// # Panics
    /// If somebody listens there.
    pub async fn at(address: &str, target: &str) -> Self {
        let listener = TcpListener::bind(address).await.expect("a free port");
        let address = listener.local_addr().expect("the port");
        let (link, link_seen) = watch::channel(Link::Open);
        let (resets, resets_seen) = watch::channel(0);
        let target = target.to_owned();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, target.clone(), link_seen.clone(), resets_seen.clone()));
            }
        });
        Self { address, link, resets, task }
    }

    /// Where it listens, as `HOST:PORT`.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Changes the link for connections that are open and for new ones.
    pub fn set(&self, link: Link) {
        self.link.send_replace(link);
    }

    /// Cuts every connection that is open now.
    pub fn reset(&self) {
        self.resets.send_modify(|resets| *resets += 1);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
        self.reset();
    }
}

async fn carry(client: TcpStream, target: String, link: watch::Receiver<Link>, mut resets: watch::Receiver<u64>) {
    resets.mark_unchanged();
    let Ok(server) = TcpStream::connect(&target).await else { return };
    for stream in [&client, &server] {
        // A reset, not an orderly end: what is in the buffers is lost.
        let _ = stream.set_zero_linger();
        let _ = stream.set_nodelay(true);
    }
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        () = pump(from_client, to_server, link.clone(), false) => {}
        () = pump(from_server, to_client, link, true) => {}
        _ = resets.changed() => {}
    }
}

async fn pump(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    mut link: watch::Receiver<Link>,
    replies: bool,
) {
    let mut buffer = vec![0; 16 * 1024];
    let mut dead = false;
    loop {
        // Black: nothing is even read, so that the sender's window fills up as on a dead link.
        if link.wait_for(|link| *link != Link::BlackHole).await.is_err() {
            return;
        }
        let Ok(read) = from.read(&mut buffer).await else { return };
        if read == 0 {
            return;
        }
        let now = *link.borrow();
        match now {
            // It was under way when the link went black; it comes when the link comes back.
            Link::BlackHole => {
                if link.wait_for(|link| *link != Link::BlackHole).await.is_err() {
                    return;
                }
            }
            Link::RepliesLost if replies => dead = true,
            Link::Throttled(rate) => {
                tokio::time::sleep(Duration::from_secs_f64(read as f64 / f64::from(rate.max(1)))).await;
            }
            Link::Open | Link::RepliesLost => {}
        }
        // A stream with a hole in it would be another kind of fault than a lost reply.
        if !dead && to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
