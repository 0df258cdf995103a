//! The suites of stores, on the SQL Server that `POSTROOM_TEST_MSSQL_URL` names. Without it they run on an emulation of SQL Server by PostgreSQL, which
//! is not SQL Server; they were never run otherwise, because none can be had here.

#![allow(clippy::unwrap_used, missing_docs)]

mod contract;
mod fixture;

mod conformance_on_an_emulation_unless_a_server_is_given {
    /// The relay's end.
    mod source {
        postroom_testkit::source_conforms!(crate::fixture::Shop);
    }

    /// The operator's end.
    mod operator {
        postroom_testkit::operator_conforms!(crate::fixture::Shop);
    }

    /// Tables that already exist.
    mod intake {
        postroom_testkit::intake_conforms!(crate::fixture::Shop);
    }

    /// The receiving end.
    mod consumer_store {
        postroom_testkit::consumer_store_conforms!(crate::fixture::Shop);
    }
}
