//! Apache Kafka, whose programs are a set of Java archives that Maven fetches.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::failure::Failure;
use crate::held::Held;
use crate::steps::step;
use crate::workspace::Workspace;

const VERSION: &str = "4.3.1";
const PROJECT: &str = r#"<project><modelVersion>4.0.0</modelVersion><groupId>x</groupId><artifactId>x</artifactId><version>1</version>
<dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>VERSION</version></dependency>
<dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
</dependencies></project>
"#;

/// Fetches them into `target/servers`, once. Returns their folder.
pub(crate) fn ensure(workspace: &Workspace, held: &Held) -> Result<PathBuf, Failure> {
    let servers = workspace.target.join("servers");
    let folder = servers.join(format!("kafka-{VERSION}"));
    if folder.is_dir() {
        return Ok(folder);
    }
    let partial = servers.join(format!("kafka-{VERSION}.partial"));
    let _ = fs::remove_dir_all(&partial);
    fs::create_dir_all(&partial)?;
    fs::write(partial.join("pom.xml"), PROJECT.replace("VERSION", VERSION))?;
    step(&format!("fetch Kafka {VERSION} into {}", folder.display()), || {
        let mut maven = Command::new("mvn");
        maven.args([
            "--batch-mode",
            "--quiet",
            "dependency:copy-dependencies",
            "-DincludeScope=runtime",
            "-DoutputDirectory=jars",
        ]);
        if !held.run(maven.current_dir(&partial))?.success() {
            return Err(Failure::work("`mvn dependency:copy-dependencies` failed, see above"));
        }
        Ok(fs::rename(partial.join("jars"), &folder)?)
    })?;
    let _ = fs::remove_dir_all(&partial);
    Ok(folder)
}
