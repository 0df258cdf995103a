//! T-SQL in the words of PostgreSQL. Each statement is read by a T-SQL grammar first.

use std::ops::ControlFlow;

use sqlparser::ast::{
    AssignmentTarget, Expr, Function, FunctionArg, FunctionArgExpr, FunctionArguments, Ident, JoinConstraint,
    JoinOperator, LimitClause, LockClause, LockType, NonBlock, ObjectName, Query, SetExpr, Statement, TableFactor,
    TableWithJoins, TopQuantity, Update, UpdateTableFromKind, Value, VisitMut as _, VisitorMut,
};
use sqlparser::dialect::{MsSqlDialect, PostgreSqlDialect};
use sqlparser::parser::Parser;

use super::wire;

/// What a batch without parameters is about.
pub enum Said {
    Settings,
    Begin,
    /// Of a consumer's session: the first read begins a transaction, whose number is read.
    BeginAndNumber,
    /// And the number that the transaction must have.
    Commit(Option<i64>),
    Rollback,
    Save,
    BackToSaved,
    /// The lock of a migration.
    Lock,
    /// Of a table or an index, in PostgreSQL's words.
    Definition(String),
    /// What PostgreSQL has nothing for.
    Nothing,
    Statement,
}

pub fn said(sql: &str) -> Said {
    let code = without_comments(sql);
    let code = code.trim();
    let begins = |words: &str| code.starts_with(words);
    match () {
        () if begins("save transaction") => Said::Save,
        () if begins("rollback transaction postroom_rows") => Said::BackToSaved,
        () if begins("set ") => Said::Settings,
        () if begins("begin transaction") => Said::Begin,
        () if code.contains("current_transaction_id()) from") => Said::BeginAndNumber,
        () if begins("if @@trancount <> 1") => {
            let number =
                code.split_once("<> 1 or current_transaction_id() <> ").and_then(|(_, rest)| rest.split_once(' '));
            Said::Commit(number.map(|(number, _)| number.parse().unwrap()))
        }
        () if begins("commit transaction") => Said::Commit(None),
        () if begins("if @@trancount > 0 rollback") => Said::Rollback,
        () if code.contains("sp_getapplock") => Said::Lock,
        () if begins("create procedure") || begins("alter table") => Said::Nothing,
        () if begins("create") => {
            read(code).unwrap_or_else(|problem| panic!("{problem}: {code}"));
            Said::Definition(definition(code))
        }
        () => Said::Statement,
    }
}

fn without_comments(sql: &str) -> String {
    let lines = sql.lines().map(|line| line.split_once("--").map_or(line, |(code, _)| code));
    lines.collect::<Vec<_>>().join("\n")
}

/// The statement, as the grammar of T-SQL reads it.
pub fn read(sql: &str) -> Result<Statement, String> {
    // The grammar knows no hints for the whole statement.
    let sql =
        sql.replace("option (loop join, force order)", "").replace("option (loop join, force order, maxdop 1)", "");
    // Nor that a computed column may be told not to be null.
    let sql = sql.replace(" persisted not null", " persisted").replace(" with (allow_page_locks = off)", "");
    let sql = match sql.trim_start().starts_with("create table") {
        true => sql.lines().filter(|line| !line.contains(" persisted")).collect::<Vec<_>>().join("\n"),
        false => sql,
    };
    let mut statements = Parser::parse_sql(&MsSqlDialect {}, &sql).map_err(|error| error.to_string())?;
    match statements.len() {
        1 => Ok(statements.remove(0)),
        count => Err(format!("{count} statements in one")),
    }
}

fn definition(code: &str) -> String {
    let mut lines = Vec::new();
    for line in code.lines() {
        if line.contains("_is_unicode check") {
            continue;
        }
        let mut line = line.to_owned();
        if let Some((name, rest)) = line.split_once(" as ").filter(|(_, rest)| rest.contains(" persisted")) {
            let name = name.trim();
            let number =
                |words: &str| rest.split_once(words).map(|(_, rest)| rest.split(')').next().unwrap().to_owned());
            line = match name {
                "lane" => {
                    let lanes = number(" % ").unwrap();
                    format!("lane smallint generated always as (lane_of(coalesce([key], aggregate_id, id), {lanes})) stored,")
                }
                "bytes" => "bytes int generated always as (octet_length(payload) + coalesce(octet_length(headers), 0) + 512) stored,".to_owned(),
                _ => {
                    let of = number("'SHA2_256', ").unwrap();
                    format!("{name} bytea generated always as (hashbytes('SHA2_256', {of})) stored,")
                }
            };
        }
        if let Some((column, _)) = line.split_once("default convert(uniqueidentifier, stuff(") {
            line = format!("{column} default gen_random_uuid()::text,");
        }
        if line.contains("isjson(") {
            line = "constraint postroom_outbox_headers_are_an_object check (is_object(headers)),".to_owned();
        }
        for length in [16, 64, 200, 255, 256, 512, 513] {
            line = line.replace(&format!("nvarchar({length})"), "text");
        }
        lines.push(
            line.replace("convert(nvarchar(8), session_context(N'postroom')) = N'1'", "true")
                .replace("datalength(convert(varchar(max), ", "octet_length(")
                .replace(" collate Latin1_General_100_BIN2_UTF8))", ")")
                .replace(" collate Latin1_General_100_BIN2", "")
                .replace("datalength(", "octet_length(")
                .replace("nvarchar(max)", "text")
                .replace("varbinary(max)", "bytea")
                .replace("bigint            identity", "bigint generated by default as identity")
                .replace("bigint        identity", "bigint generated by default as identity")
                .replace("datetime2(6)", "timestamp(6)")
                .replace("tinyint", "smallint")
                .replace("default newid()", "default gen_random_uuid()::text")
                .replace("uniqueidentifier", "text")
                .replace("nvarchar(20)", "varchar(20)")
                .replace("nchar(64)", "text")
                .replace("[key]", "\"key\"")
                .replace("default sysutcdatetime()", "default (clock_timestamp() at time zone 'UTC')")
                .replace(" with (allow_page_locks = off)", "")
                .replace("N'", "'"),
        );
    }
    lines.join("\n")
}

/// A statement in PostgreSQL's words.
pub struct Translated {
    pub sql: String,
    pub reads: bool,
    /// Which of the parameters it has, in this order.
    pub parameters: Vec<usize>,
}

pub fn translated(sql: &str, values: &[wire::Value]) -> Result<Translated, String> {
    let sql = without_comments(sql);
    // `delete ALIAS from …`.
    let words_of: Vec<&str> = sql.split_whitespace().take(3).collect();
    let target = match words_of[..] {
        ["delete", target, "from"] => Some(target),
        _ => None,
    };
    let mut statement = match target {
        Some(_) => read(&format!("select 1 {}", &sql[sql.find("from").unwrap_or_default()..]))?,
        None => read(&sql)?,
    };
    let mut words = Words { values, used: Vec::new(), problem: None };
    let _ = statement.visit(&mut words);
    match &mut statement {
        Statement::Update(update) => without_target(update)?,
        Statement::Query(query) if target.is_some() => {
            let sql = deleting(query, target.unwrap_or_default())?;
            return words.problem.map_or(Ok(Translated { sql, reads: false, parameters: words.used }), Err);
        }
        _ => {}
    }
    // The key is locked, also where there is no row yet: whoever comes later finds that it is there.
    let waits = matches!(statement, Statement::Insert(_)) && sql.contains("holdlock");
    match words.problem {
        Some(problem) => Err(problem),
        None => Ok(Translated {
            sql: format!("{statement}{}", if waits { " on conflict do nothing" } else { "" }),
            reads: matches!(statement, Statement::Query(_)),
            parameters: words.used,
        }),
    }
}

struct Words<'a> {
    values: &'a [wire::Value],
    used: Vec<usize>,
    problem: Option<String>,
}

fn expression(sql: &str) -> Expr {
    Parser::new(&PostgreSqlDialect {}).try_with_sql(sql).unwrap().parse_expr().unwrap()
}

impl VisitorMut for Words<'_> {
    type Break = ();

    fn post_visit_ident(&mut self, ident: &mut Ident) -> ControlFlow<()> {
        if ident.quote_style == Some('[') {
            ident.quote_style = Some('"');
        }
        ControlFlow::Continue(())
    }

    fn post_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<()> {
        match expr {
            Expr::Identifier(name) if name.value == "@@spid" => *expr = expression("0"),
            Expr::Identifier(name) => {
                if let Some(number) = name.value.strip_prefix("@P") {
                    let index = number.parse::<usize>().ok().and_then(|number| number.checked_sub(1));
                    match index.and_then(|index| Some((index, self.values.get(index)?))) {
                        Some((index, value)) => {
                            // PostgreSQL takes no parameter that is not used.
                            let at = self.used.iter().position(|used| *used == index).unwrap_or_else(|| {
                                self.used.push(index);
                                self.used.len() - 1
                            });
                            *expr = expression(&format!("${}::{}", at + 1, value.kind()));
                        }
                        None => self.problem = Some(format!("must declare the scalar variable @P{number}")),
                    }
                }
            }
            Expr::Value(value) => {
                if let Value::NationalStringLiteral(text) = &value.value {
                    value.value = Value::SingleQuotedString(text.clone());
                }
            }
            Expr::Function(Function { name, args: FunctionArguments::List(list), .. }) => {
                // The first argument of these is no expression, but a word.
                let name = name.to_string();
                if name == "count_big" {
                    *expr = expression(&expr.to_string().replacen("count_big", "count", 1));
                } else if name == "dateadd" || name == "datediff_big" {
                    let Some(FunctionArg::Unnamed(FunctionArgExpr::Expr(part))) = list.args.first_mut() else {
                        self.problem = Some(format!("{name} without a unit"));
                        return ControlFlow::Continue(());
                    };
                    *part = expression(&format!("'{part}'"));
                }
            }
            Expr::Collate { expr: of, .. } => *expr = (**of).clone(),
            Expr::Convert { expr: of, data_type, styles, .. } => {
                let kind = data_type.as_ref().map(ToString::to_string).unwrap_or_default().to_lowercase();
                let sql = match kind.as_str() {
                    "nvarchar(33)" if !styles.is_empty() => format!("iso({of})"),
                    "datetime2(6)" => format!("({of})::timestamp"),
                    "float" => format!("({of})::float8"),
                    "nchar(36)" => format!("upper(({of})::text)"),
                    other if other.starts_with("nvarchar(") => format!("({of})::text"),
                    "int" if of.to_string().to_lowercase().starts_with("substring(hashbytes(") => {
                        format!("two_bytes({of})")
                    }
                    "bigint" | "int" | "smallint" => format!("({of})::{kind}"),
                    "uniqueidentifier" => format!("({of})::text"),
                    "binary(32)" => of.to_string(),
                    other => {
                        self.problem = Some(format!("a conversion to {other}"));
                        return ControlFlow::Continue(());
                    }
                };
                *expr = expression(&sql);
            }
            _ => {}
        }
        ControlFlow::Continue(())
    }

    fn post_visit_table_factor(&mut self, factor: &mut TableFactor) -> ControlFlow<()> {
        let TableFactor::OpenJsonTable { json_expr, columns, alias, .. } = factor else {
            return ControlFlow::Continue(());
        };
        let mut read = Vec::new();
        for column in columns {
            let path = column.path.as_deref().unwrap_or("$").to_owned();
            let value = match path.strip_prefix("$[").and_then(|rest| rest.strip_suffix(']')) {
                Some(index) => format!("(e.value ->> {index})"),
                None => "(e.value #>> '{}')".to_owned(),
            };
            let kind = column.r#type.to_string().to_lowercase();
            let kind =
                if kind.starts_with("nvarchar") || kind == "uniqueidentifier" { "text".to_owned() } else { kind };
            read.push(format!("{value}::{kind} as \"{}\"", column.name.value));
        }
        let alias = alias.as_ref().map(|alias| alias.name.value.clone()).unwrap_or_default();
        let sql =
            format!("(select {} from jsonb_array_elements(({json_expr})::jsonb) e(value)) {alias}", read.join(", "));
        *factor = Parser::new(&PostgreSqlDialect {}).try_with_sql(&sql).unwrap().parse_table_factor().unwrap();
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, query: &mut Query) -> ControlFlow<()> {
        let SetExpr::Select(select) = &mut *query.body else { return ControlFlow::Continue(()) };
        if let Some(top) = select.top.take() {
            let limit = match top.quantity {
                Some(TopQuantity::Expr(limit)) => Some(limit),
                Some(TopQuantity::Constant(limit)) => Some(expression(&limit.to_string())),
                None => None,
            };
            query.limit_clause = Some(LimitClause::LimitOffset { limit, offset: None, limit_by: Vec::new() });
        }
        for table in &mut select.from {
            for join in &mut table.joins {
                if let JoinOperator::CrossApply = join.join_operator {
                    join.join_operator = JoinOperator::CrossJoin(JoinConstraint::None);
                    if let TableFactor::Derived { lateral, .. } = &mut join.relation {
                        *lateral = true;
                    }
                }
            }
            let factors =
                std::iter::once(&mut table.relation).chain(table.joins.iter_mut().map(|join| &mut join.relation));
            for factor in factors {
                let TableFactor::Table { name, alias, with_hints, .. } = factor else { continue };
                let hints: Vec<String> = with_hints.drain(..).map(|hint| hint.to_string()).collect();
                let has = |hint: &str| hints.iter().any(|known| known == hint);
                let lock_type = match () {
                    () if has("updlock") => LockType::Update,
                    () if has("repeatableread") => LockType::Share,
                    () => continue,
                };
                let of =
                    alias.as_ref().map_or_else(|| name.clone(), |alias| ObjectName::from(vec![alias.name.clone()]));
                query.locks.push(LockClause {
                    lock_type,
                    of: Some(of),
                    nonblock: has("readpast").then_some(NonBlock::SkipLocked),
                });
            }
        }
        ControlFlow::Continue(())
    }
}

fn without_hints(factor: &mut TableFactor) {
    if let TableFactor::Table { with_hints, .. } = factor {
        with_hints.clear();
    }
}

/// The table that the alias names, the others, and the conditions of the joins.
fn taken_apart(
    from: Vec<TableWithJoins>,
    target: &str,
) -> Result<(TableFactor, Vec<TableWithJoins>, Vec<Expr>), String> {
    let (mut found, mut others, mut conditions) = (None, Vec::new(), Vec::new());
    for table in from {
        let mut factors = vec![table.relation];
        for join in table.joins {
            let (JoinOperator::Join(constraint) | JoinOperator::Inner(constraint)) = join.join_operator else {
                return Err("a join of another kind".to_owned());
            };
            if let JoinConstraint::On(condition) = constraint {
                conditions.push(condition);
            }
            factors.push(join.relation);
        }
        for mut factor in factors {
            without_hints(&mut factor);
            let is_target =
                matches!(&factor, TableFactor::Table { alias: Some(alias), .. } if alias.name.value == target);
            match is_target {
                true => found = Some(factor),
                false => others.push(TableWithJoins { relation: factor, joins: Vec::new() }),
            }
        }
    }
    Ok((found.ok_or(format!("there is no table {target}"))?, others, conditions))
}

fn all_of(conditions: Vec<Expr>, selection: Option<Expr>) -> Option<Expr> {
    let conditions: Vec<String> =
        conditions.into_iter().chain(selection).map(|condition| format!("({condition})")).collect();
    (!conditions.is_empty()).then(|| expression(&conditions.join(" and ")))
}

fn without_target(update: &mut Update) -> Result<(), String> {
    without_hints(&mut update.table.relation);
    for assignment in &mut update.assignments {
        if let AssignmentTarget::ColumnName(name) = &mut assignment.target {
            name.0.drain(..name.0.len() - 1);
        }
    }
    let Some(UpdateTableFromKind::AfterSet(from)) = update.from.take() else { return Ok(()) };
    let (table, others, conditions) = taken_apart(from, &update.table.to_string())?;
    update.table = TableWithJoins { relation: table, joins: Vec::new() };
    update.from = (!others.is_empty()).then_some(UpdateTableFromKind::AfterSet(others));
    update.selection = all_of(conditions, update.selection.take());
    Ok(())
}

/// Of a select with the tables and conditions of a `delete ALIAS from`, which the grammar does not know.
fn deleting(query: &mut Query, target: &str) -> Result<String, String> {
    let SetExpr::Select(select) = &mut *query.body else { return Err("no select".to_owned()) };
    let (table, others, conditions) = taken_apart(std::mem::take(&mut select.from), target)?;
    let others: Vec<String> = others.iter().map(ToString::to_string).collect();
    let using = if others.is_empty() { String::new() } else { format!("using {}", others.join(", ")) };
    let condition = all_of(conditions, select.selection.take()).ok_or("a delete of everything")?;
    Ok(format!("delete from {table} {using} where {condition}"))
}
