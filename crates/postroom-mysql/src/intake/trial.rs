//! Changes that are tried on rows that wait, and rolled back.

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Transaction};
use postroom::{Finding, Intake, IntakeRow, Setting, Trial};

use super::table::{Statements, quoted};
use super::{drop_rows, now_us, of_row, rows};
use crate::desk::{Failed, begin};

/// What no row takes; none: nothing is known to be wrong.
pub(super) async fn tried(
    conn: &mut Conn,
    intake: &Intake,
    statements: &Statements,
    named: &str,
) -> Result<Option<Finding>, Failed> {
    if let Some(bad) = states(conn, intake, statements, named).await? {
        return Ok(Some(bad));
    }
    let mut tx = begin(conn).await?;
    let many = i64::try_from(Trial::ROWS).unwrap_or(i64::MAX);
    let next = rows(&mut tx, statements.next_keys(&intake.name, many)).await?;
    let next = next.into_iter().map(|row| statements.keys_of(row)).collect::<Result<Vec<_>, _>>()?;
    let next: Vec<IntakeRow> = next.into_iter().map(|(row, _)| row).collect();
    let mut bad = None;
    if !next.is_empty() {
        let free = rows(&mut tx, statements.free(&next)).await?;
        let free: Vec<IntakeRow> = free.iter().map(|row| statements.whole(row)).collect();
        let now = now_us(&mut tx).await?;
        bad = intake.none_is_a_message(named, &free, now);
        if bad.is_none() {
            bad = refused_by_all(&mut tx, intake, statements, &free, named).await?;
        }
    }
    tx.rollback().await?;
    Ok(bad)
}

async fn refused_by_all(
    tx: &mut Transaction<'_>,
    intake: &Intake,
    statements: &Statements,
    free: &[IntakeRow],
    named: &str,
) -> Result<Option<Finding>, Error> {
    for trial in intake.trials() {
        let mut refused = None;
        for row in free {
            refused = refuses(tx, statements, &trial, &row.row).await?;
            if refused.is_none() {
                break;
            }
        }
        if let Some(told) = refused {
            return Ok(Some(trial.refused(named, free.len(), &told)));
        }
    }
    Ok(None)
}

/// Why this row does not take it.
async fn refuses(
    tx: &mut Transaction<'_>,
    statements: &Statements,
    trial: &Trial,
    row: &str,
) -> Result<Option<String>, Error> {
    tx.query_drop("savepoint postroom_trial").await?;
    let (keys, mut refused) = ([row.to_owned()], None);
    for step in &trial.steps {
        let error = step.iter().any(|(_, setting)| *setting == Setting::Error).then_some(Trial::ERROR);
        if let Err(error) = drop_rows(tx, statements.set(step, &keys, error)).await {
            refused = Some(of_row(&error).ok_or(error)?);
            break;
        }
    }
    tx.query_drop("rollback to savepoint postroom_trial").await?;
    Ok(refused)
}

/// A value of `pending` that is none of an enum's, or that a constraint of its column alone excludes.
async fn states(
    conn: &mut Conn,
    intake: &Intake,
    statements: &Statements,
    named: &str,
) -> Result<Option<Finding>, Error> {
    let columns: std::collections::BTreeSet<&str> = intake.states().map(|(column, _)| column).collect();
    if columns.is_empty() {
        return Ok(None);
    }
    for (column, value) in intake.states() {
        let of = statements.table.shape.column(column).map_or("", |column| column.type_name.as_str());
        if enum_without(of, value) {
            return Ok(Some(Intake::no_such_state(named, column, value, &format!("its type is {of}"))));
        }
    }
    for clause in clauses(conn, intake).await? {
        for (column, value) in intake.states() {
            let sql = format!("select coalesce(({clause}), true) from (select ? as {}) f", quoted(column));
            // One that is about other columns too cannot be asked like this.
            match conn.exec_first::<i64, _, _>(sql, (value,)).await {
                Ok(Some(0)) => {
                    let why = format!("a constraint of the table excludes it: {clause}");
                    return Ok(Some(Intake::no_such_state(named, column, value, &why)));
                }
                Ok(_) | Err(Error::Server(_)) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(None)
}

/// The conditions of the table's check constraints. MariaDB has the table's name beside each of them, and MySQL has it elsewhere.
async fn clauses(conn: &mut Conn, intake: &Intake) -> Result<Vec<String>, Error> {
    let sql = "select count(*) from information_schema.columns
                where table_schema = 'information_schema' and table_name = 'CHECK_CONSTRAINTS' and column_name = 'TABLE_NAME'";
    let is_mariadb: i64 = conn.query_first(sql).await?.unwrap_or_default();
    let sql = if is_mariadb > 0 {
        "select c.check_clause from information_schema.check_constraints c where c.constraint_schema = coalesce(?, database()) and c.table_name = ?"
    } else {
        "select c.check_clause from information_schema.check_constraints c
           join information_schema.table_constraints t on t.constraint_schema = c.constraint_schema and t.constraint_name = c.constraint_name
          where t.constraint_schema = coalesce(?, database()) and t.table_name = ?"
    };
    let clauses: Vec<String> = conn.exec(sql, (&intake.table.schema, &intake.table.name)).await?;
    // MySQL writes the quotes of texts with a backslash before them.
    Ok(clauses.into_iter().map(|clause| clause.replace("\\'", "'")).collect())
}

/// Whether a type is an enum that has no such value. Pure.
fn enum_without(type_name: &str, value: &str) -> bool {
    let lower = type_name.to_lowercase();
    let Some(labels) = lower.strip_prefix("enum(") else { return false };
    let wanted = format!("'{}'", value.to_lowercase().replace('\'', "''"));
    // Labels have no other quotes than those around them and doubled ones.
    !labels.contains(&wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_enum_has_its_values_and_no_others() {
        let of = "enum('new','it''s done')";
        assert!(!enum_without(of, "new") && !enum_without(of, "NEW") && !enum_without(of, "it's done"));
        assert!(enum_without(of, "nwe") && enum_without(of, "ne"));
        assert!(!enum_without("varchar(20)", "x"));
    }
}
