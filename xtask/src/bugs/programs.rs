//! Bugs of the program, of what it serves and of the archive.

use super::Bug;

pub(super) const BUGS: &[Bug] = &[
    Bug {
        name: "return_matched_to_its_confirm",
        breaks: "takes a returned message for the one whose confirm carried it",
        package: "postroom-cli",
        test: &["--test", "relay", "unroutable_messages_are_never_marked_stored"],
        needs_bin: false,
    },
    Bug {
        name: "an_idle_relay_trusts_its_connection",
        breaks: "says that a sink is up whose broker is away",
        package: "postroom-cli",
        test: &[
            "--test",
            "relay",
            "a_relay_with_nothing_to_publish_notices_that_its_broker_is_away_and_that_it_is_back",
        ],
        needs_bin: true,
    },
    Bug {
        name: "large_messages_without_end",
        breaks: "receives large messages without a limit in bytes",
        package: "postroom-cli",
        test: &["--test", "relay", "large_messages_wait_at_the_broker_while_the_inbox_cannot_be_written"],
        needs_bin: true,
    },
    Bug {
        name: "a_process_without_its_store_is_ready",
        breaks: "says that a process is ready although the store has not known of it for longer than its lease",
        package: "postroom-server",
        test: &["--lib", "a_process_is_ready_while_the_store_knows_of_all_its_parts"],
        needs_bin: false,
    },
    Bug {
        name: "a_batch_is_counted_as_one_message",
        breaks: "counts confirmed batches instead of confirmed messages",
        package: "postroom-cli",
        test: &["--test", "relay", "counters_equal_the_ledger_after_outages"],
        needs_bin: true,
    },
    Bug {
        name: "any_token_will_do",
        breaks: "lets anybody in who sends some token",
        package: "postroom-server",
        test: &["--lib", "a_token_may_do_what_its_role_may"],
        needs_bin: false,
    },
    Bug {
        name: "a_segment_is_not_read_back",
        breaks: "believes an archive that says that it has stored a segment",
        package: "postroom-archive",
        test: &["--lib", "what_cannot_be_read_back_is_not_stored"],
        needs_bin: false,
    },
    Bug {
        name: "an_operation_forgets_ages",
        breaks: "acts on dead letters of any age",
        package: "postroom-cli",
        test: &["--test", "relay", "an_operation_on_dead_letters_keeps_to_every_condition"],
        needs_bin: true,
    },
    Bug {
        name: "what_is_on_its_way_is_missing",
        breaks: "calls messages missing that were not sent yet",
        package: "postroom-cli",
        test: &["--test", "relay", "what_is_on_its_way_is_not_missing"],
        needs_bin: true,
    },
    Bug {
        name: "another_outbox_is_this_one",
        breaks: "puts messages of another outbox back into this one",
        package: "postroom-cli",
        test: &["--test", "relay", "odd_messages_and_other_outboxes_do_no_harm"],
        needs_bin: true,
    },
    Bug {
        name: "a_viewer_may_act",
        breaks: "lets any token do everything over the admin API",
        package: "postroom-cli",
        test: &["--test", "relay", "the_api_shows_and_does_what_its_description_and_a_token_allow"],
        needs_bin: true,
    },
    Bug {
        name: "a_payload_is_shown_in_secret",
        breaks: "leaves no audit row about who saw a payload",
        package: "postroom-cli",
        test: &["--test", "relay", "the_api_shows_and_does_what_its_description_and_a_token_allow"],
        needs_bin: true,
    },
    Bug {
        name: "retention_waits_for_no_route",
        breaks: "removes messages that a route of the configuration has not seen, since it is not registered yet",
        package: "postroom-cli",
        test: &["--test", "relay", "nothing_is_removed_before_every_route_of_the_configuration_is_registered"],
        needs_bin: true,
    },
];
