//! Puts the fence between the broker's bytes and the client library, behind TLS where there is TLS.
//!
//! The library takes any socket that belongs to a runtime. Ours is tokio's runtime with sockets that pass what they read
//! through a [`Fence`]; writing, timers and tasks are tokio's.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use async_rs::traits::{Executor, Reactor, RuntimeKit};
use async_rs::util::Task;
use async_rs::{Runtime, Tokio};
use futures_io::{AsyncRead, AsyncWrite};
use futures_util::Stream;
use futures_util::future::{Either, select};
use lapin::tcp::{AMQPUriTcpExt, AsyncTcpStream, OwnedTLSConfig};
use lapin::uri::AMQPUri;
use lapin::{Connection, ConnectionProperties};
use tokio::sync::Notify;

use super::fence::{Fence, Refusal};

/// How much is read from the socket at once.
const READ_BYTES: usize = 65_536;
/// While nothing is read. The shortest heartbeat that can be asked for is a second, and the library waits for twice that.
const HEARTBEAT_EVERY: Duration = Duration::from_millis(500);
/// Type, channel, size and end of an empty frame.
const HEARTBEAT: [u8; 8] = [8, 0, 0, 0, 0, 0, 0, 0xce];

type TokioStream = <Tokio as Reactor>::TcpStream;

/// What a connection lets in.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub frame_max: u32,
    /// Most bytes of messages that were received and not answered; none: only messages are counted, by the broker.
    pub unsettled_bytes_max: Option<u64>,
}

/// Connects through a fence with these limits. When the fence refuses what the broker sends before the
/// connection is open this fails at once, with the fence's words: the client library would only try again.
pub(super) async fn connect(
    uri: AMQPUri,
    tls: OwnedTLSConfig,
    properties: ConnectionProperties,
    limits: Limits,
) -> Result<Connection, postroom::BoxError> {
    let refused = Arc::new(Refused::default());
    let fenced = Fenced { tokio: Tokio::current(), limits, refused: refused.clone() };
    let runtime = Runtime::new(fenced.clone());
    let open = async move |uri: AMQPUri, _: Runtime<Fenced>| {
        let stream = uri.connect_with_config_async(tls.as_ref(), &Runtime::new(fenced.tokio.clone())).await?;
        // To the library this is a plain socket; what encrypts is inside.
        Ok(AsyncTcpStream::Plain(fenced.fence(stream)))
    };
    let connecting = pin!(Connection::connector(uri, runtime, open, properties));
    match select(connecting, pin!(refused.wait())).await {
        Either::Left((connection, _)) => Ok(connection?),
        Either::Right((refusal, _)) => Err(refusal.into()),
    }
}

/// What a fence of this connection has refused, for whoever waits for the connection.
#[derive(Debug, Default)]
struct Refused {
    refusal: OnceLock<Refusal>,
    told: Notify,
}

impl Refused {
    fn tell(&self, refusal: Refusal) {
        if self.refusal.set(refusal).is_ok() {
            self.told.notify_one();
        }
    }

    async fn wait(&self) -> Refusal {
        loop {
            self.told.notified().await;
            if let Some(refusal) = self.refusal.get() {
                return refusal.clone();
            }
        }
    }
}

/// Tokio with fenced sockets.
#[derive(Debug, Clone)]
struct Fenced {
    tokio: Tokio,
    limits: Limits,
    refused: Arc<Refused>,
}

impl Fenced {
    fn fence(&self, stream: AsyncTcpStream<TokioStream>) -> FencedStream {
        let fence = Fence::new(self.limits.frame_max);
        let fence = match self.limits.unsettled_bytes_max {
            Some(bytes) => fence.limited_to(bytes),
            None => fence,
        };
        FencedStream {
            stream,
            fence,
            reader: None,
            paused: None,
            tokio: self.tokio.clone(),
            refused: self.refused.clone(),
            refusal: None,
            read: vec![0; READ_BYTES],
            unfed: 0..0,
            passed: Vec::new(),
            taken: 0,
        }
    }
}

impl RuntimeKit for Fenced {}

impl Executor for Fenced {
    type Task<T: Send + 'static> = <Tokio as Executor>::Task<T>;

    fn block_on<T, F: Future<Output = T>>(&self, future: F) -> T {
        self.tokio.block_on(future)
    }

    fn spawn<T: Send + 'static, F: Future<Output = T> + Send + 'static>(&self, future: F) -> Task<Self::Task<T>> {
        self.tokio.spawn(future)
    }

    fn spawn_blocking<T: Send + 'static, F: FnOnce() -> T + Send + 'static>(&self, work: F) -> Task<Self::Task<T>> {
        self.tokio.spawn_blocking(work)
    }
}

impl Reactor for Fenced {
    type TcpStream = FencedStream;
    type Sleep = <Tokio as Reactor>::Sleep;

    /// The client library registers no socket of anybody else, and there is none that the fence would stand in front of.
    fn register<H: io::Read + io::Write + Send + 'static>(
        &self,
        _socket: H,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        Err::<FencedStream, _>(io::ErrorKind::Unsupported.into())
    }

    fn sleep(&self, duration: Duration) -> Self::Sleep {
        self.tokio.sleep(duration)
    }

    fn interval(&self, duration: Duration) -> impl Stream<Item = Instant> + Send + 'static {
        self.tokio.interval(duration)
    }

    fn tcp_connect_addr(
        &self,
        address: SocketAddr,
    ) -> impl Future<Output = io::Result<Self::TcpStream>> + Send + 'static {
        let (kit, connecting) = (self.clone(), self.tokio.tcp_connect_addr(address));
        async move { Ok(kit.fence(AsyncTcpStream::Plain(connecting.await?))) }
    }
}

/// A socket, with TLS or without, that hands on only what its fence lets through.
struct FencedStream {
    stream: AsyncTcpStream<TokioStream>,
    fence: Fence,
    /// Who waits for what comes, while nothing is read.
    reader: Option<Waker>,
    /// Until the library is told that the broker is alive, while nothing is read.
    paused: Option<Pin<Box<<Tokio as Reactor>::Sleep>>>,
    /// The library reads on a thread of its own, which has no timers.
    tokio: Tokio,
    refused: Arc<Refused>,
    /// Said after everything that passed before it was taken.
    refusal: Option<Refusal>,
    read: Vec<u8>,
    /// Where in `read` is what the fence has not taken.
    unfed: Range<usize>,
    /// What the fence let through and nobody took yet, from `taken` on: at most one frame more than was read at once.
    passed: Vec<u8>,
    taken: usize,
}

impl FencedStream {
    fn sent(&mut self, bytes: &[u8]) {
        if self.fence.sent(bytes)
            && let Some(reader) = self.reader.take()
        {
            reader.wake();
        }
    }
}

impl AsyncRead for FencedStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        loop {
            let waiting = this.passed.get(this.taken..).unwrap_or_default();
            if !waiting.is_empty() {
                let (taken, _) = waiting.split_at(waiting.len().min(buffer.len()));
                if let Some(buffer) = buffer.get_mut(..taken.len()) {
                    buffer.copy_from_slice(taken);
                }
                this.taken += taken.len();
                return Poll::Ready(Ok(taken.len()));
            }
            this.passed.clear();
            this.taken = 0;
            if let Some(refusal) = &this.refusal {
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, refusal.clone())));
            }
            // Whoever does not read what the broker sends makes it wait. The client library must not take that for a broker that has
            // gone: it hears a heartbeat of ours instead.
            if this.fence.is_full() {
                this.reader = Some(cx.waker().clone());
                let tokio = &this.tokio;
                let pause = this.paused.get_or_insert_with(|| Box::pin(tokio.sleep(HEARTBEAT_EVERY)));
                match pause.as_mut().poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(()) => {
                        this.paused = None;
                        this.passed.extend_from_slice(&HEARTBEAT);
                        continue;
                    }
                }
            }
            (this.reader, this.paused) = (None, None);
            if this.unfed.is_empty() {
                this.unfed = match Pin::new(&mut this.stream).poll_read(cx, &mut this.read) {
                    Poll::Ready(Ok(bytes)) if bytes > 0 => 0..bytes,
                    ended => return ended,
                };
            }
            match this.fence.feed(this.read.get(this.unfed.clone()).unwrap_or_default(), &mut this.passed) {
                Ok(taken) => this.unfed.start += taken,
                Err(refusal) => {
                    this.refused.tell(refusal.clone());
                    this.refusal = Some(refusal);
                }
            }
        }
    }
}

impl AsyncWrite for FencedStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(count)) = written {
            this.sent(bytes.get(..count).unwrap_or_default());
        }
        written
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, bytes);
        if let Poll::Ready(Ok(mut count)) = written {
            for part in bytes {
                let (sent, _) = part.split_at(part.len().min(count));
                count -= sent.len();
                this.sent(sent);
            }
        }
        written
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_close(cx)
    }
}
