//! What `postroom doctor` finds in outbox tables of applications: those whose rows are taken, and those that a preset fits.

use postroom::{
    Diagnosis, Done, Intake, IntakeStatus, Intakes, Literal, Severity, Store, StoreError, TableIndex, lasting,
};

use crate::config::{Mode, Taken, conditions};
use crate::exit::{self, Failure};
use crate::presets::fitting;
use crate::table::counted;

/// No claim of a relay that lives lasts so long, in seconds.
const LONGEST_CLAIM: f64 = 3600.0;
/// So many rows that are done are worth a word.
const MANY: i64 = 10_000;
/// So many rows are looked at for the names of their types.
const SAMPLE: usize = 50;

/// What is wrong with each of these tables, and with others that are known; with the table's name.
pub async fn diagnose(store: &dyn Store, taken: &[Taken]) -> Result<Vec<(String, Diagnosis)>, Failure> {
    let Some(intakes) = store.intakes() else { return Ok(Vec::new()) };
    let mut tables: Vec<(Taken, bool)> = taken.iter().map(|taken| (taken.clone(), true)).collect();
    for fitting in fitting(intakes).await? {
        let is_known = |(taken, _): &(Taken, bool)| {
            let table = &taken.intake.table;
            table.name == fitting.table.name && (table.schema.is_none() || table.schema == fitting.table.schema)
        };
        if !tables.iter().any(is_known) {
            tables.push((fitting.taken, false));
        }
    }
    let mut found = Vec::new();
    for (taken, is_configured) in tables {
        let name = taken.intake.table.to_string();
        match one(intakes, &taken, is_configured).await {
            Ok(of_table) => found.extend(of_table.into_iter().map(|diagnosis| (name.clone(), diagnosis))),
            Err(error) if error.is_transient() => return Err(error.into()),
            Err(error) => {
                let why = Failure::of(exit::FAILURE, &error).text;
                let advice = "postroom intake list, or postroom presets detect";
                found.push((name, Diagnosis::unknown("table", why, advice)));
            }
        }
    }
    Ok(found)
}

async fn one(intakes: &dyn Intakes, taken: &Taken, is_configured: bool) -> Result<Vec<Diagnosis>, StoreError> {
    let intake = &taken.intake;
    let table = name_of(intakes, intake);
    let (status, indexes) = (intakes.intake_status(intake).await?, intakes.indexes_of(&intake.table).await?);
    let mut found = vec![Diagnosis::fine("table", waiting(&status))];
    if let Some(stuck) = &taken.stuck {
        let status = intakes.intake_status(&intake.looking_for(&stuck.rows)).await?;
        let old = status.pending > 0 && status.oldest_seconds.is_none_or(|age| age > LONGEST_CLAIM);
        let claims = intake.pending.iter().any(|one| stuck.rows.contains(one)) && taken.mode == Mode::Active;
        found.push(Diagnosis::unless(
            old && !(claims && is_configured),
            ("rows-stuck", "no row is claimed for longer than an hour"),
            Severity::Danger,
            &format!("{} claimed and not sent: {}", rows(&status), age(&status)),
            &match is_configured {
                true => format!("postroom intake free {} --older-than 1h --reason …", intake.name),
                false => format!(
                    "postroom intake free {} --older-than 1h --reason …, with the [[intake]] in the configuration that `postroom presets detect` prints for {table}",
                    intake.name
                ),
            },
        ));
    }
    for defect in taken.preset.and_then(|preset| preset.about().ok()).map_or_else(Vec::new, |about| about.defects) {
        let Ok(conditions) = conditions(&defect.rows, "") else { continue };
        let status = intakes.intake_status(&intake.looking_for(&conditions)).await?;
        let mend = defect.mend.replace("{table}", &table);
        found.extend(shown(&defect.code, &status, &mend));
    }
    found.push(payload_in_index(intake, &indexes));
    found.push(no_index(intakes, intake, &indexes, &status));
    found.push(senders(&intakes.senders_to(&intake.table).await?, is_configured && taken.mode == Mode::Active));
    let sample = intakes.preview_intake(intake, SAMPLE).await?;
    let kinds = sample.iter().filter_map(|row| row.message.as_ref().ok()).map(|message| message.kind.as_str());
    found.push(type_names(kinds));
    Ok(found)
}

/// The table as a statement needs it.
fn name_of(intakes: &dyn Intakes, intake: &Intake) -> String {
    let name = intakes.quoted(&intake.table.name);
    match &intake.table.schema {
        Some(schema) => format!("{}.{name}", intakes.quoted(schema)),
        None => name,
    }
}

fn rows(status: &IntakeStatus) -> String {
    let verb = if status.pending == 1 { "is" } else { "are" };
    format!("{} {verb}", counted(status.pending, status.pending_is_bound, "row"))
}

fn age(status: &IntakeStatus) -> String {
    status.oldest_seconds.map_or_else(
        || "nothing tells for how long".to_owned(),
        |age| format!("the oldest was written {} ago", lasting(age)),
    )
}

fn waiting(status: &IntakeStatus) -> String {
    format!("{} to be sent", rows(status))
}

/// Rows that a preset has a word about.
fn shown(code: &str, status: &IntakeStatus, mend: &str) -> Option<Diagnosis> {
    let any = status.pending > 0;
    Some(match code {
        "rows-marked-unsent" => Diagnosis::unless(
            any,
            ("rows-marked-unsent", "no row is marked as sent that has an error"),
            Severity::Danger,
            &format!(
                "{} marked as sent although an error is noted, so nothing was sent: {}",
                rows(status),
                age(status)
            ),
            mend,
        ),
        "rows-given-up" => Diagnosis::unless(
            any,
            ("rows-given-up", "the former relay has given up no row"),
            Severity::Warning,
            &format!("{} given up by the former relay, whatever the reason was: {}", rows(status), age(status)),
            mend,
        ),
        "rows-kept" => Diagnosis::unless(
            status.pending >= MANY,
            ("rows-kept", "few rows are kept that were sent"),
            Severity::Note,
            &format!("{} sent and still there: {}", rows(status), age(status)),
            mend,
        ),
        _ => return None,
    })
}

fn payload_in_index(intake: &Intake, indexes: &[TableIndex]) -> Diagnosis {
    let payload = intake.message.payload.sole_column().unwrap_or_default();
    let has = |index: &&TableIndex| index.columns.iter().chain(&index.included).any(|column| column == payload);
    let with: Option<&TableIndex> = indexes.iter().find(has);
    Diagnosis::unless(
        with.is_some(),
        ("payload-in-index", "no index has a copy of the payload"),
        Severity::Danger,
        &format!(
            "index {} has a copy of {payload}: a message that is too large for a page of the index fails, and the business transaction with it",
            with.map_or("", |index| index.name.as_str())
        ),
        &format!("{}, after you have made one without that column", with.map_or("", |index| &index.removal)),
    )
}

/// A look for what is to be sent reads the whole table.
pub fn no_index(intakes: &dyn Intakes, intake: &Intake, indexes: &[TableIndex], status: &IntakeStatus) -> Diagnosis {
    let states: Vec<&str> = intake.pending.iter().map(|(column, _)| column.as_str()).collect();
    let row = intake.row.as_deref();
    let first = intake.order.first().map(String::as_str).or(row);
    let helps = |index: &TableIndex| {
        let leads = index.columns.first().map(String::as_str);
        let condition = index.condition.as_deref().unwrap_or_default().to_lowercase();
        leads.is_some_and(|column| states.contains(&column))
            || states.iter().any(|column| condition.contains(&column.to_lowercase()))
            || (states.is_empty() && (first.is_none() || leads == first))
    };
    let mut columns = states.clone();
    columns.extend(intake.order.iter().map(String::as_str));
    let columns: Vec<String> = columns.into_iter().map(|column| intakes.quoted(column)).collect();
    let literal = |(column, values): &(String, Vec<Literal>)| match values.first() {
        Some(Literal::Null) => format!("{} is null", intakes.quoted(column)),
        _ => String::new(),
    };
    let nulls: Vec<String> = intake.pending.iter().map(literal).filter(|text| !text.is_empty()).collect();
    let condition = if nulls.is_empty() { String::new() } else { format!(" where {}", nulls.join(" and ")) };
    let few = status.pending < 100 && intake.sent == Done::Delete;
    Diagnosis::unless(
        !few && !indexes.iter().any(helps),
        ("rows-without-index", "an index leads to the rows that are to be sent"),
        Severity::Warning,
        "no index leads to the rows that are to be sent: each look for them reads the whole table",
        &format!(
            "create index {} on {} ({}){condition}",
            intakes.quoted(&format!("{}_pending", intake.table.name)),
            name_of(intakes, intake),
            columns.join(", ")
        ),
    )
}

fn senders(sessions: &[String], is_active: bool) -> Diagnosis {
    const CODE: &str = "two-senders";
    let mut names = sessions.to_vec();
    names.dedup();
    let (count, names) = (counted(sessions.len() as i64, false, "other session"), names.join(", "));
    match sessions.len() {
        0 => Diagnosis::fine(CODE, "no other session was seen to change rows"),
        _ if is_active => Diagnosis::of(
            CODE,
            Severity::Warning,
            format!("{count} changed rows of this table although postroom takes them: {names}"),
            "stop the former relay, or each message goes out twice",
        ),
        1 => Diagnosis::fine(CODE, format!("{count} changes rows: {names}")),
        _ => Diagnosis::of(
            CODE,
            Severity::Note,
            format!("{count} change rows: {names}"),
            "if they send, and claim no rows (for update skip locked), each sends every message: let one of them run, or postroom",
        ),
    }
}

/// A name that a compiler made changes with the program.
fn type_names<'a>(mut kinds: impl Iterator<Item = &'a str>) -> Diagnosis {
    let is_class = |kind: &&str| {
        let parts: Vec<&str> = kind.split(['.', '+', '$', '\\']).collect();
        let last = parts.last().copied().unwrap_or_default();
        kind.contains(", Version=")
            || kind.contains(['+', '\\'])
            || (parts.len() > 2 && last.starts_with(|first: char| first.is_ascii_uppercase()))
    };
    match kinds.find(is_class) {
        None => Diagnosis::fine("type-names", "types do not look like names of classes"),
        Some(kind) => Diagnosis::of(
            "type-names",
            Severity::Note,
            format!(
                "the type {kind:?} looks like the name of a class: consumers break when the class is renamed or moved"
            ),
            "write a name of your own into the table, or map it in the consumer",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_classes_are_told_from_names() {
        for class in [
            "Shop.Orders.OrderPlaced, Shop, Version=1.0.0.0, Culture=neutral",
            "com.example.shop.OrderPlaced",
            "Shop.Orders+Placed",
            "App\\Orders\\Placed",
        ] {
            assert_eq!(type_names([class].into_iter()).severity, Severity::Note, "{class}");
        }
        for name in ["order.placed", "OrderPlaced", "orders.order.placed", "Order.Placed", "order-placed/v2"] {
            assert_eq!(type_names([name].into_iter()).severity, Severity::Fine, "{name}");
        }
    }
}
