//! The suites that every store passes, as far as this one has the part.

/// The relay's end.
mod source {
    postroom_testkit::source_conforms!(crate::fixture::Shop);
}

/// The operator's end.
mod operator {
    postroom_testkit::operator_conforms!(crate::fixture::Shop);
}

/// The receiving end.
mod consumer_store {
    postroom_testkit::consumer_store_conforms!(crate::fixture::Shop);
}

/// Tables that already exist.
mod intake {
    postroom_testkit::intake_conforms!(crate::fixture::Shop);
}
