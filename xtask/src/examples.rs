//! `cargo xtask orders`, `checkout` and `articles`: an example on private servers of its own.

use std::process::ExitCode;

use postroom_testkit::services::MysqlServer;

use crate::failure::Failure;
use crate::held::Held;
use crate::packages;
use crate::steps::step;
use crate::test::{build_programs, exit_code, passed_on, start_services};
use crate::workspace::Workspace;

pub(crate) fn run(name: &str, args: &[String]) -> Result<ExitCode, Failure> {
    let extra = passed_on(name, args)?;
    let workspace = Workspace::find()?;
    let held = Held::until_interrupted()?;
    packages::ensure(&held)?;
    build_programs(&workspace, &held)?;
    let played = start_services(&workspace, &held).and_then(|environment| {
        let url = |name: &str| environment.iter().find(|(known, _)| *known == name).map(|(_, url)| url.clone());
        let (Some(store), Some(rabbitmq)) = (url("POSTROOM_TEST_POSTGRES"), url("POSTROOM_TEST_RABBITMQ")) else {
            return Err(Failure::work("the servers have no address"));
        };
        // The articles' tasks are on MariaDB; it is stopped when this is dropped.
        let mariadb = match name {
            "articles" => {
                let folder = workspace.target.join("services").join(format!("mariadb-{}", std::process::id()));
                Some(step("start MariaDB", || Ok::<_, Failure>(MysqlServer::start(&folder)?))?)
            }
            _ => None,
        };
        step(name, || {
            let mut example = std::process::Command::new(workspace.built("release", name));
            example.arg("--store").arg(store).arg("--rabbitmq").arg(rabbitmq).args(extra);
            if let Some(mariadb) = &mariadb {
                example.arg("--mariadb").arg(mariadb.url("mysql"));
            }
            Ok(held.run(&mut example)?)
        })
    });
    held.let_go();
    Ok(exit_code(played?))
}
