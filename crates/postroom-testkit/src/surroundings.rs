//! What `cargo xtask test` prepared for the tests: servers, binaries, a scratch folder.

use std::path::PathBuf;

/// URL of the test run's PostgreSQL, database `postgres`.
pub fn postgres_url() -> String {
    required("POSTROOM_TEST_POSTGRES")
}

/// URL of the test run's RabbitMQ.
pub fn rabbitmq_url() -> String {
    required("POSTROOM_TEST_RABBITMQ")
}

/// The `postroom` binary that fault tests start and kill.
pub fn postroom_binary() -> PathBuf {
    required("POSTROOM_BIN").into()
}

/// That binary, to be started without what only tests know of the environment.
pub fn postroom() -> std::process::Command {
    let mut command = std::process::Command::new(postroom_binary());
    without_tests(&mut command);
    command
}

/// Takes out of a command's environment what only tests know.
pub fn without_tests(command: &mut std::process::Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("POSTROOM_") && name != "POSTROOM_LOG") {
            command.env_remove(name);
        }
    }
}

/// The orders example.
pub fn orders_binary() -> PathBuf {
    required("POSTROOM_ORDERS_BIN").into()
}

/// The checkout example.
pub fn checkout_binary() -> PathBuf {
    required("POSTROOM_CHECKOUT_BIN").into()
}

/// The example of the articles' systems.
pub fn articles_binary() -> PathBuf {
    required("POSTROOM_ARTICLES_BIN").into()
}

/// A new empty folder under the test run's scratch folder.
///
/// # Panics
/// If it cannot be created.
pub fn scratch(name: &str) -> PathBuf {
    let dir = PathBuf::from(required("POSTROOM_TEST_DIR")).join(format!("{name}-{}", unique()));
    std::fs::create_dir_all(&dir).expect("create a scratch folder");
    dir
}

/// A name that no other test of this machine uses now.
pub fn unique() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{}_{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn required(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| {
        panic!("{variable} is not set: run the tests with `cargo xtask test`, which starts the servers")
    })
}
