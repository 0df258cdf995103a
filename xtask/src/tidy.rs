//! `cargo xtask tidy`: what the architecture promises and the compiler cannot check.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::failure::Failure;
use crate::patches::{self, Patch};
use crate::{seeded_bugs, sources, workspace};

const LINES_MAX: usize = 700;
const BROKER_NAMES: [&str; 5] = ["rabbitmq", "lapin", "nats", "jetstream", "kafka"];
/// Folders where no broker may be named: they must work with any. A broker's name belongs in its folder, in the one list, and in
/// the Cargo feature.
const BROKER_FREE: [&str; 10] = [
    "crates/postroom/src",
    "crates/postroom-relay/src",
    "crates/postroom-consumer/src",
    "crates/postroom-server/src",
    "crates/postroom-postgres/src",
    "crates/postroom-sqlite/src",
    "crates/postroom-mysql/src",
    "crates/postroom-mssql/src",
    "crates/postroom-brokers/src/in_process",
    "crates/postroom-brokers/src/lines",
];
const STORE_NAMES: [&str; 4] = ["postroom_postgres", "postroom_sqlite", "postroom_mysql", "postroom_mssql"];
/// Where no store may be named: programs know a store by its ports. The one list of stores and the demo, which is an application on
/// SQLite, are the exceptions.
const STORE_FREE: [&str; 6] = [
    "crates/postroom/src",
    "crates/postroom-relay/src",
    "crates/postroom-consumer/src",
    "crates/postroom-brokers/src",
    "crates/postroom-server/src",
    "crates/postroom-cli/src",
];
const NAMES_STORES: [&str; 2] = ["crates/postroom-cli/src/store.rs", "crates/postroom-cli/src/demo"];
/// Folders with Rust files of ours.
const OURS: [&str; 3] = ["crates", "examples", "xtask"];
/// Folders whose code has no switches for seeded bugs.
const SEEDLESS: [&str; 3] = ["crates", "examples", "bench"];
const TESTKIT: &str = "postroom-testkit";

/// Something that is not as it should be: where, what, and what to do.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    line: usize,
    text: String,
}

impl Finding {
    fn new(line: usize, text: impl Into<String>) -> Self {
        Self { line, text: text.into() }
    }
}

pub(crate) fn run(args: &[String]) -> Result<ExitCode, Failure> {
    if let Some(first) = args.first() {
        return Err(Failure::usage(format!("tidy takes no arguments, and got `{first}`")));
    }
    let root = workspace::root();
    let (files, findings) = check(&root)?;
    for (path, finding) in &findings {
        let path = path.strip_prefix(&root).unwrap_or(path);
        println!("{}:{}: {}", path.display(), finding.line, finding.text);
    }
    println!("{files} files looked at, {} findings", findings.len());
    Ok(if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// How many files were looked at, and what was found in them.
fn check(root: &Path) -> Result<(usize, Vec<(PathBuf, Finding)>), Failure> {
    let mut findings = Vec::new();
    let mut files = 0;
    let mut look = |path: PathBuf, found: Vec<Finding>| {
        files += 1;
        findings.extend(found.into_iter().map(|finding| (path.clone(), finding)));
    };
    let crates = root.join("crates");
    let mut manifests: Vec<PathBuf> =
        fs::read_dir(&crates)?.flatten().map(|entry| entry.path().join("Cargo.toml")).filter(|m| m.exists()).collect();
    manifests.sort();
    for manifest in manifests {
        let found = wrong_directions(&sources::read(&manifest)?);
        look(manifest, found);
    }
    let broker_free = BROKER_FREE.map(|folder| root.join(folder));
    for folder in OURS.iter().map(|folder| root.join(folder)).filter(|folder| folder.exists()) {
        for file in sources::files(&folder, &[".rs"])? {
            let text = sources::read(&file)?;
            let mut found = too_long(&text);
            found.extend(impurities(&text));
            if broker_free.iter().any(|folder| file.starts_with(folder)) {
                found.extend(broker_names(&text));
            }
            let within = |folders: &[&str]| folders.iter().any(|folder| file.starts_with(root.join(folder)));
            if within(&STORE_FREE) && !within(&NAMES_STORES) {
                found.extend(store_names(&text));
            }
            look(file, found);
        }
    }
    for folder in broker_free.into_iter().filter(|folder| !folder.exists()) {
        let told = "the folder is gone, so nothing keeps brokers' names out; correct BROKER_FREE in xtask/src/tidy.rs";
        findings.push((folder, Finding::new(1, told)));
    }
    findings.extend(switches(root)?);
    findings.extend(stale_patches(root, &seeded_bugs::names())?);
    Ok((files, findings))
}

/// Mentions of seeded bugs outside of xtask.
fn switches(root: &Path) -> Result<Vec<(PathBuf, Finding)>, Failure> {
    let mut files = vec![root.join("Cargo.toml")];
    for folder in SEEDLESS {
        files.extend(sources::files(&root.join(folder), &[".rs", ".sql", ".toml"])?);
    }
    let mut found = Vec::new();
    for file in files {
        let text = sources::read(&file)?;
        found.extend(seeds(&text).into_iter().map(|finding| (file.clone(), finding)));
    }
    Ok(found)
}

fn seeds(text: &str) -> Vec<Finding> {
    let lines = (1..).zip(text.lines()).filter(|(_, line)| line.contains("seeded_bug"));
    let told = format!("product code has no switches for seeded bugs; make the bug a patch in {}", patches::FOLDER);
    lines.map(|(number, _)| Finding::new(number, told.clone())).collect()
}

/// Patches of seeded bugs that do not apply, that are missing, or that no bug has.
fn stale_patches(root: &Path, bugs: &[&str]) -> Result<Vec<(PathBuf, Finding)>, Failure> {
    let unpaired = patches::unpaired(root, bugs)?;
    let mut found: Vec<_> = unpaired.into_iter().map(|(file, told)| (file, Finding::new(1, told))).collect();
    for patch in bugs.iter().map(|name| Patch::of(root, name)).filter(|patch| patch.file().exists()) {
        if let Some(told) = patch.stale(root)? {
            found.push((patch.file().to_owned(), Finding::new(1, told)));
        }
    }
    Ok(found)
}

/// What a crate may use of our own crates. `None`: everything but the test kit.
fn allowed(crate_name: &str) -> Option<&'static [&'static str]> {
    match crate_name {
        "postroom" => Some(&[]),
        "postroom-cli" => None,
        // It shows what both of them do.
        "postroom-server" => Some(&["postroom", "postroom-relay", "postroom-consumer"]),
        // Stores, brokers, the relay, the consumer, the test kit: they meet in the contracts of `postroom` only.
        _ => Some(&["postroom"]),
    }
}

/// Dependencies of ours in a `Cargo.toml` that point the wrong way. Dev-dependencies are free.
fn wrong_directions(manifest: &str) -> Vec<Finding> {
    let mut name = "";
    let mut uses = Vec::new();
    let mut table = "";
    for (number, line) in (1..).zip(manifest.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if let Some(header) = line.strip_prefix('[') {
            table = header.trim_end_matches(']');
            if let Some((parent, dependency)) = table.rsplit_once('.')
                && is_dependencies(parent)
            {
                uses.push((number, unquoted(dependency)));
            }
        } else if let Some((key, value)) = line.split_once('=') {
            let key = unquoted(key.split('.').next().unwrap_or_default());
            if table == "package" && key == "name" {
                name = unquoted(value);
            } else if is_dependencies(table) {
                uses.push((number, renamed(value).unwrap_or(key)));
            } else if key == "package" && table.rsplit_once('.').is_some_and(|(parent, _)| is_dependencies(parent)) {
                uses.push((number, unquoted(value)));
            }
        }
    }
    let wrong = |dependency: &str| match allowed(name) {
        _ if dependency != "postroom" && !dependency.starts_with("postroom-") => None,
        _ if dependency == TESTKIT => Some("is for tests; make it a dev-dependency"),
        Some(fine) if !fine.contains(&dependency) => {
            Some("points the wrong way; put what both need into `postroom`, or let postroom-cli bring them together")
        }
        _ => None,
    };
    uses.into_iter()
        .filter_map(|(number, dependency)| {
            Some(Finding::new(number, format!("{name} depends on {dependency}, which {}", wrong(dependency)?)))
        })
        .collect()
}

/// `dependencies`, `build-dependencies`, and either below `target.'...'`.
fn is_dependencies(table: &str) -> bool {
    let last = table.rsplit('.').next().unwrap_or_default();
    (last == "dependencies" || last == "build-dependencies") && (table == last || table.starts_with("target."))
}

/// The `package = "..."` of an inline table.
fn renamed(value: &str) -> Option<&str> {
    let (_, rest) = value.split_once("package")?;
    rest.trim_start().strip_prefix('=')?.split('"').nth(1)
}

fn unquoted(text: &str) -> &str {
    text.trim().trim_matches(['"', '\''])
}

fn broker_names(text: &str) -> Vec<Finding> {
    (1..)
        .zip(text.lines())
        .filter_map(|(number, line)| {
            let line = line.to_lowercase();
            let name = BROKER_NAMES.into_iter().find(|name| line.contains(name))?;
            let told =
                format!("names the broker `{name}`; say what any broker does, or move it to its broker's folder");
            Some(Finding::new(number, told))
        })
        .collect()
}

fn store_names(text: &str) -> Vec<Finding> {
    (1..)
        .zip(text.lines())
        .filter_map(|(number, line)| {
            let name = STORE_NAMES.into_iter().find(|name| line.contains(name))?;
            let told = format!(
                "names the store `{name}`; use the ports of `postroom`, or the list in crates/postroom-cli/src/store.rs"
            );
            Some(Finding::new(number, told))
        })
        .collect()
}

fn too_long(text: &str) -> Vec<Finding> {
    let lines = text.lines().count();
    if lines < LINES_MAX {
        return Vec::new();
    }
    vec![Finding::new(LINES_MAX, format!("{lines} lines; split the file along a seam that has a name"))]
}

/// What a file whose first line calls it pure must not have.
fn impurities(text: &str) -> Vec<Finding> {
    let first = text.lines().next().unwrap_or_default();
    if !first.starts_with("//!") || !words(first).any(|word| word.eq_ignore_ascii_case("pure")) {
        return Vec::new();
    }
    (1..)
        .zip(text.lines())
        .filter(|(_, line)| !line.trim_start().starts_with("//"))
        .filter_map(|(number, line)| {
            let what = if words(line).any(|word| word == "async") {
                "`async`"
            } else {
                ["Instant::now", "SystemTime::now"].into_iter().find(|clock| line.contains(clock))?
            };
            let told = format!("{what} in a file that calls itself pure; let the caller do it and hand in the result");
            Some(Finding::new(number, told))
        })
        .collect()
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_folder::TestFolder;

    fn lines(findings: &[Finding]) -> Vec<usize> {
        findings.iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn a_store_depends_on_the_contracts_only() {
        let manifest = "[package]\nname = \"postroom-sqlite\"\n[dependencies]\npostroom.workspace = true\nbytes = \"1\"\n\
                        postroom-relay.workspace = true # no\n[dev-dependencies]\npostroom-testkit.workspace = true\n";
        let found = wrong_directions(manifest);
        assert_eq!(lines(&found), [6]);
        assert!(found[0].text.starts_with("postroom-sqlite depends on postroom-relay"), "{found:?}");
    }

    #[test]
    fn every_way_to_write_a_dependency_is_seen() {
        let manifest = "[package]\nname = \"postroom\"\n[target.'cfg(unix)'.dependencies]\npostroom-cli = { path = \"x\" }\n\
                        [dependencies.postroom-relay]\nworkspace = true\n[build-dependencies]\n\
                        x = { package = \"postroom-brokers\", path = \"y\" }\n[dependencies.z]\n\
                        package = \"postroom-sqlite\"\n[features]\npostroom-postgres = []\n";
        assert_eq!(lines(&wrong_directions(manifest)), [4, 5, 8, 10]);
    }

    #[test]
    fn the_command_line_may_use_all_but_the_test_kit() {
        let manifest = "[package]\nname = \"postroom-cli\"\n[dependencies]\npostroom-relay.workspace = true\n\
                        postroom-testkit.workspace = true\n";
        assert_eq!(lines(&wrong_directions(manifest)), [5]);
    }

    #[test]
    fn a_broker_is_found_in_any_case() {
        assert_eq!(lines(&broker_names("// RabbitMQ\nlet sink = 1;\nuse lapin::Channel;\n")), [1, 3]);
    }

    #[test]
    fn a_store_is_named_in_the_list_of_stores_only() {
        assert_eq!(lines(&store_names("use postroom::Store;\nlet it = postroom_sqlite::connect(path);\n")), [2]);
    }

    #[test]
    fn a_pure_file_neither_waits_nor_looks_at_the_clock() {
        let text = "//! Pure: which lane.\n// async is fine here\nasync fn a() {}\nlet now = Instant::now();\nasynchronous();\n";
        assert_eq!(lines(&impurities(text)), [3, 4]);
        assert_eq!(impurities(&text.replace("Pure", "Impure")), []);
    }

    #[test]
    fn a_switch_for_a_seeded_bug_is_found() {
        assert_eq!(lines(&seeds("let a = 1;\nif cfg!(seeded_bug = \"a\") {}\n")), [2]);
    }

    #[test]
    fn patches_that_do_not_apply_are_found_and_so_are_those_of_no_bug() {
        let folder = TestFolder::new("tidy");
        let patch = |line: &str| format!("diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1 +1 @@\n-{line}\n+bug\n");
        folder.write("a", "now\n");
        folder.write("xtask/seeded-bugs/fresh.patch", &patch("now"));
        folder.write("xtask/seeded-bugs/stale.patch", &patch("before"));
        folder.write("xtask/seeded-bugs/unknown.patch", &patch("now"));
        let found = stale_patches(&folder.0, &["fresh", "stale"]).unwrap();
        let names: Vec<_> = found.iter().map(|(file, _)| file.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["unknown.patch", "stale.patch"], "{found:?}");
    }

    #[test]
    fn a_file_of_700_lines_is_too_long() {
        assert_eq!(too_long(&"\n".repeat(699)), []);
        assert_eq!(lines(&too_long(&"\n".repeat(700))), [700]);
    }
}
