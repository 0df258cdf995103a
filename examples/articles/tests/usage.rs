//! What the program says about itself. `cargo xtask test` builds by this test the programs that others kill.

#![allow(clippy::unwrap_used)]

use std::process::Command;

#[test]
fn it_says_how_it_is_used_and_refuses_what_it_does_not_know() {
    let told = |argument: &str| Command::new(env!("CARGO_BIN_EXE_articles")).arg(argument).output().unwrap();
    let help = told("--help");
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(help.status.success() && text.contains("--messages"), "{text}");
    let unknown = told("--no-such-option");
    assert_eq!(unknown.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("--no-such-option"));
}
