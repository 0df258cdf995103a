//! The PostgreSQL store passes the suites that every store passes.

/// The relay's end.
mod source {
    postroom_testkit::source_conforms!(crate::fixture::Postgres);
}

/// The operator's end.
mod operator {
    postroom_testkit::operator_conforms!(crate::fixture::Postgres);
}

/// Tables that already exist.
mod intake {
    postroom_testkit::intake_conforms!(crate::fixture::Postgres);
}

/// The receiving end, through tokio-postgres.
mod consumer_store {
    postroom_testkit::consumer_store_conforms!(crate::fixture::Through<crate::fixture::TokioPostgres>);
}

/// The receiving end, through sqlx 0.9.
mod consumer_store_sqlx {
    postroom_testkit::consumer_store_conforms!(crate::fixture::Through<crate::fixture::Sqlx>);
}

/// The receiving end, through sqlx 0.8.
mod consumer_store_sqlx_08 {
    postroom_testkit::consumer_store_conforms!(crate::fixture::Through<crate::fixture::Sqlx08>);
}
