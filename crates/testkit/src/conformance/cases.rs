//! The cases of each suite by name. A test below fails if one is missing.

/// Expands to one named test per case of a suite.
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_suite {
    (admin, $fixture:expr) => {
        $crate::conformance_cases! { admin, $fixture,
            a_replayed_event_is_due_now_with_no_attempts_and_a_fresh_dedupe_id replaying_twice_replays_once
            a_retrying_event_can_be_sent_now replay_never_touches_pending_dispatched_or_discarded_events
            a_selection_narrows_a_replay a_replayed_event_holds_its_key_again
            dead_events_of_one_key_are_retried_in_their_order a_discarded_event_is_never_delivered
            pending_events_are_discarded_only_by_id discarding_leaves_the_dispatched_and_other_subscriptions_alone
            discarding_a_follower_keeps_the_others_waiting a_replay_is_found_by_the_next_read
            a_large_replay_goes_in_bounded_steps small_steps_discard_all_that_is_named too_many_ids_at_once_are_refused
            key_tenant_and_time_narrow_a_change a_dry_run_counts_and_changes_nothing
            a_large_dry_run_goes_in_the_same_steps what_is_dead_for_long_is_given_up
        }
    };
    (append, $fixture:expr) => {
        $crate::conformance_cases! { append, $fixture,
            ids_come_back_in_the_order_given an_append_of_nothing_gives_nothing one_call_takes_many_events
            every_limit_is_refused_with_its_code_and_nothing_is_written an_event_that_is_in_the_log_already_is_known
            another_event_under_a_taken_id_is_a_conflict_and_nothing_is_written
            an_unknown_log_is_not_found appending_in_a_transaction_is_the_same a_rolled_back_id_is_free_again
            concurrent_appends_of_one_id_leave_one_event events_carry_on_the_context_they_are_appended_in
        }
    };
    (apply, $fixture:expr) => {
        $crate::conformance_cases! { apply, $fixture,
            effects_and_position_commit_together a_failed_handler_undoes_only_its_own_effect
            a_panicking_handler_fails_alone later_events_of_a_failed_key_are_blocked_and_not_run
            without_order_a_failure_blocks_nobody entries_of_the_settlement_are_written_as_they_are
            under_a_lost_lease_nothing_is_committed due_rows_are_applied_in_one_commit_too
            a_due_row_is_not_applied_once_an_earlier_one_of_its_key_is_back
            a_due_row_that_is_put_behind_its_key_undoes_no_other
            a_commit_with_a_lost_answer_is_not_done_again a_late_commit_is_not_done_beside_the_same
            a_commit_that_never_comes_keeps_no_lock_for_longer_than_a_lease
        }
    };
    (crashes, $fixture:expr) => {
        $crate::conformance_cases! { crashes, $fixture,
            holders_who_vanish_are_counted_until_one_gives_the_lane_back events_that_arrive_make_no_difference
            who_held_a_lane_for_long_begins_the_count_anew who_takes_its_own_lane_again_has_not_vanished
            a_grant_with_a_lost_answer_counts_once a_late_grant_counts_once
            an_event_whose_relay_vanished_with_it_counts_a_crash an_event_that_came_back_counts_no_crash
            crashes_add_up_and_a_replay_leaves_one a_takeover_counts_no_crash_of_other_lanes
        }
    };
    (dead_letters, $fixture:expr) => {
        $crate::conformance_cases! { dead_letters, $fixture,
            a_dead_event_is_a_letter_until_it_is_handed_over only_dead_events_are_letters
            letters_wait_for_their_lane_and_subscription a_letter_that_is_put_off_comes_again large_letters_come_whole_in_any_order
            a_replay_or_a_discard_takes_the_letter_back an_event_that_dies_again_is_a_letter_again
            a_lost_lease_hands_nothing_over letters_are_not_pruned
        }
    };
    (expiry, $fixture:expr) => {
        $crate::conformance_cases! { expiry, $fixture,
            what_has_an_end_comes_with_the_time_it_has_left an_expired_event_is_dead_without_an_attempt
            an_expired_event_holds_nobody_back an_expired_row_keeps_its_attempts what_has_ended_is_not_sent_again
        }
    };
    (fidelity, $fixture:expr) => {
        $crate::conformance_cases! { fidelity, $fixture,
            every_field_comes_back inspecting_shows_the_same_bytes payload_bytes_come_back_identical
            a_payload_at_the_limit_comes_back strange_topics_and_keys_come_back keys_that_look_alike_are_different
            headers_come_back times_come_back_to_the_microsecond
        }
    };
    (hold, $fixture:expr) => {
        $crate::conformance_cases! { hold, $fixture,
            a_key_with_an_unfinished_event_is_held blocked_events_follow_their_head_in_order
            a_limit_never_gives_a_follower_without_its_head a_deep_key_leaves_room_for_the_heads_of_others
            the_next_of_a_key_is_due_once_its_head_is_delivered
            the_next_of_a_key_is_due_once_its_head_is_dead the_next_of_a_key_is_due_once_its_head_is_discarded
            followers_stay_blocked_when_their_head_fails_again a_follower_that_fails_becomes_the_head
            a_dead_event_does_not_hold_its_key a_halting_dead_event_holds_its_key_until_a_person_acts
            a_block_with_nothing_ahead_is_due_at_once a_scheduled_event_waits_and_holds_nothing
            a_scheduled_event_does_not_wait_for_its_key without_order_a_retry_holds_nothing
            once_there_is_no_order_nobody_waits_for_a_turn without_order_the_next_of_a_key_is_due_too
            a_failure_in_one_subscription_holds_nobody_elses_key
        }
    };
    (inspect, $fixture:expr) => {
        $crate::conformance_cases! { inspect, $fixture,
            an_unknown_subscription_is_not_found_and_the_known_are_named logs_are_made_listed_and_counted
            subscriptions_show_lanes_leases_and_pauses stats_count_every_state stats_of_an_empty_log_are_zero
            stats_follow_the_settled_position pending_topics_are_counted_deepest_first_with_their_age
            delayed_events_do_not_age_before_their_time the_newest_events_are_known_with_their_age
            dispatched_counts_each_delivered_event_once
            a_deep_backlog_is_near_the_truth several_share_what_is_looked_at every_state_lists_its_own
            lists_are_paged_in_seq_order without_a_state_the_newest_are_listed_first lists_narrow_by_topic_and_code
            a_list_is_bounded_by_its_payloads a_list_without_payloads_has_everything_else
            lists_narrow_by_key_tenant_and_time lists_narrow_by_conversation
            an_unknown_event_is_none an_id_is_found_by_its_beginning events_are_dated_by_the_time_of_the_store
        }
    };
    (late, $fixture:expr) => {
        $crate::conformance_cases! { late, $fixture,
            a_late_grant_takes_a_lane_from_nobody a_late_renewal_or_release_concerns_no_other_lease
            a_late_window_loses_nothing_of_a_relay_that_ends a_late_window_loses_nothing_of_a_relay_that_goes_on
            a_late_position_or_rewind_passes_nothing_else a_late_settlement_makes_no_row_again
            a_late_settlement_and_read_lose_nothing_and_pass_nothing_else
            a_late_settlement_of_due_rows_undoes_no_replay
            a_settlement_that_stops_half_way_keeps_no_lock_for_longer_than_a_lease
            a_late_append_with_own_ids_stores_nothing_twice a_late_message_is_a_duplicate
            a_late_replay_sends_nothing_twice a_late_replay_of_the_delivered_is_another_replay
            a_late_look_for_what_nobody_wants_finds_nothing_twice a_late_discard_takes_back_nothing_delivered
            a_late_mark_takes_back_nothing_delivered
            a_late_prune_takes_nothing_that_is_needed a_late_pause_is_the_same_pause
            a_late_pause_or_resume_replaces_what_was_set_since a_late_leave_ends_with_the_next_heartbeat
            a_late_handover_concerns_no_later_death a_late_rename_renames_no_other
            a_late_removal_removes_no_other a_late_reset_moves_nothing_that_was_taken_since
            a_late_change_of_lanes_loses_nothing
            a_late_subscribe_makes_nothing_again a_late_migration_up_changes_nothing
            a_migration_down_whose_caller_has_gone_destroys_nothing_later
        }
    };
    (lease, $fixture:expr) => {
        $crate::conformance_cases! { lease, $fixture,
            subscribing_again_is_fine_and_updates_the_filter subscribing_to_an_unknown_log_is_not_found
            another_number_of_lanes_changes_nothing another_log_is_a_conflict lanes_out_of_bounds_are_refused
            concurrent_subscribing_is_fine acquiring_needs_a_subscription
            a_held_lane_is_given_to_nobody_else_until_released an_expired_lease_is_taken_over_with_a_higher_epoch
            a_renewed_lease_outlives_its_first_deadline an_expired_lease_is_stale_even_if_nobody_took_it
            after_a_takeover_every_call_of_the_old_owner_is_stale a_released_lease_is_stale
            a_takeover_makes_calls_in_flight_due_at_once a_takeover_leaves_calls_of_other_lanes_alone
            a_stale_settlement_changes_nothing lanes_are_given_one_by_one
            a_lost_grant_is_granted_again_and_a_known_one_is_left_alone concurrent_acquires_never_share_a_lane
            replicas_counts_who_asked_lately replicas_forgets_who_fell_silent
            a_pause_gives_no_lease_and_ends_the_running_one a_pause_with_an_end_ends_by_itself
            a_pause_that_would_end_in_the_past_is_refused
        }
    };
    (lanes, $fixture:expr) => {
        $crate::conformance_cases! { lanes, $fixture,
            more_lanes_lose_nothing_and_repeat_nothing fewer_lanes_lose_nothing_and_repeat_nothing
            who_leaves_counts_no_longer_as_a_replica
            lanes_that_stand_apart_keep_the_order_of_each_key the_former_holders_are_fenced_and_have_their_time
            the_same_number_of_lanes_changes_nothing bad_numbers_of_lanes_are_refused
            lanes_too_far_apart_are_refused other_lanes_judge_by_the_filters_of_before
            rows_go_with_their_key what_commits_late_is_read_by_the_new_lanes
        }
    };
    (lifecycle, $fixture:expr) => {
        $crate::conformance_cases! { lifecycle, $fixture,
            a_renamed_subscription_keeps_everything_but_its_name a_renamed_one_is_fenced_and_its_holder_has_its_time
            a_name_that_is_taken_is_refused the_former_name_begins_like_a_new_one
            a_removed_subscription_is_gone_and_frees_retention a_name_made_again_begins_like_a_new_one
            what_a_removed_one_took_is_not_unrouted what_changed_since_it_was_looked_at_is_left_alone
        }
    };
    (lost, $fixture:expr) => {
        $crate::conformance_cases! { lost, $fixture,
            a_grant_with_a_lost_answer_locks_its_lane_no_longer_than_the_lease a_renewal_and_a_release_may_be_repeated
            a_window_with_a_lost_answer_is_read_again a_position_and_a_rewind_may_be_repeated
            a_settlement_and_the_read_after_it_may_be_repeated
            a_settlement_repeated_makes_no_row_again a_settlement_of_due_rows_repeated_undoes_no_replay
            an_append_without_ids_is_stored_whole_each_time a_message_that_was_stored_is_a_duplicate
            a_replay_of_the_delivered_repeated_is_one a_look_for_what_nobody_wants_repeated_finds_nothing_twice
            a_handover_repeated_is_one a_rename_repeated_is_one a_removal_repeated_removes_nothing_else
            a_reset_repeated_is_one a_change_of_lanes_repeated_is_one a_migration_that_was_done_is_done
        }
    };
    (mark, $fixture:expr) => {
        $crate::conformance_cases! { mark, $fixture,
            a_marked_event_is_dead_wherever_it_stood what_is_decided_or_delivered_is_not_marked what_waits_for_its_time_is_not_marked
            the_key_of_a_marked_event_goes_on a_marked_event_holds_its_key_in_the_middle_of_a_page the_key_of_a_marked_event_waits_where_dead_ones_hold_theirs
            an_event_marked_in_flight_stays_dead an_event_marked_before_it_was_read_is_revived_once_it_is_passed
        }
    };
    (migrate, $fixture:expr) => {
        $crate::conformance_cases! { migrate, $fixture,
            a_migrated_store_validates_and_up_does_nothing down_removes_everything_and_up_makes_it_anew
            down_refuses_where_events_are_undelivered down_refuses_where_events_are_unrouted
            subscribing_without_a_schema_names_the_cure
            two_starters_at_once_apply_each_migration_once the_script_names_every_migration
        }
    };
    (order, $fixture:expr) => {
        $crate::conformance_cases! { order, $fixture,
            an_open_transaction_is_invisible_until_it_commits a_rolled_back_transaction_leaves_nothing
            a_rolled_back_savepoint_leaves_the_rest a_refused_append_in_a_transaction_writes_nothing
            a_late_commit_with_a_low_seq_is_delivered a_commit_inside_an_open_window_is_not_lost
            a_transaction_open_over_many_windows_delays_only_itself per_key_order_is_commit_order_not_begin_order
            starting_now_includes_what_commits_later
        }
    };
    (transact, $fixture:expr) => {
        $crate::conformance_cases! { transact, $fixture,
            handlers_and_what_they_append_commit_with_the_position what_is_appended_carries_on_the_event_s_context
            a_failure_takes_back_what_every_handler_did_until_it_is_retried
            what_is_refused_or_cannot_be_read_is_dead
            several_who_commit_the_transaction_repeat_nobody
            who_ends_the_transaction_is_dead_and_the_others_are_handled who_commits_the_transaction_is_dead_too
            who_commits_and_hides_it_is_dead_too
        }
    };
    (prune, $fixture:expr) => {
        $crate::conformance_cases! { prune, $fixture,
            old_dispatched_events_go_and_young_ones_stay nothing_undelivered_is_ever_pruned
            every_subscription_must_have_passed one_that_stands_still_keeps_only_what_it_wants discarded_events_go_once_they_are_passed
            events_that_one_does_not_want_go_with_the_others
            a_log_without_subscriptions_is_not_pruned another_logs_subscriptions_have_no_say
            pruning_an_unknown_log_is_not_found an_open_transaction_survives_pruning
            pruning_goes_on_until_nothing_is_left what_stays_does_not_keep_what_follows
            a_narrowed_prune_takes_what_is_meant a_limited_prune_takes_the_oldest
            a_prune_by_code_takes_what_was_taken_out_with_it
        }
    };
    (read, $fixture:expr) => {
        $crate::conformance_cases! { read, $fixture,
            an_empty_log_gives_an_empty_batch_at_once events_come_in_the_order_appended settled_events_never_come_again
            the_byte_limit_holds_and_a_larger_event_comes_alone what_was_not_settled_is_given_to_the_next_holder
            batches_can_be_prefetched_and_settled_in_order prefetched_batches_come_again_after_a_crash
            settling_and_reading_on_in_one_call_is_the_same_as_in_two
            reading_on_before_settling_loses_nothing a_rewind_reads_on_right_after_the_position
            a_rewind_without_a_position_reads_on_after_the_last_settled subscriptions_read_independently
            logs_are_separate starting_now_skips_what_was_committed_before
            lanes_partition_the_events_and_keep_keys_together only_wanted_topics_come_and_like_wildcards_are_literal
            only_the_wanted_tenant_comes unwanted_events_are_passed_over an_append_wakes_a_waiting_relay
            an_append_before_the_wait_is_read_without_a_hint a_lease_knows_when_it_has_read_what_was_there
        }
    };
    (reset, $fixture:expr) => {
        $crate::conformance_cases! { reset, $fixture,
            a_reset_to_the_beginning_sends_everything_again a_reset_to_now_skips_what_is_unread
            what_is_retried_after_a_reset_skipped_it_is_dispatched
            a_reset_to_a_place_sends_again_and_skips a_reset_to_a_time_begins_with_the_first_since
            a_reset_waits_for_no_relay a_reset_moves_every_lane_at_once
            what_fails_after_a_reset_is_of_that_replay what_commits_late_is_not_skipped
            what_a_reset_skips_is_not_unrouted a_reset_reads_by_the_present_filter
            what_was_sent_all_the_same_is_judged_anew
        }
    };
    (receive, $fixture:expr) => {
        $crate::conformance_cases! { receive, $fixture,
            a_message_is_stored_once_and_can_be_read the_same_message_again_is_a_duplicate
            the_same_id_with_another_body_is_a_conflict conflicts_are_listed_the_latest_first
            ids_are_unique_per_source_and_tenant of_concurrent_copies_exactly_one_is_accepted
            of_concurrent_bodies_one_wins_and_the_other_conflicts messages_of_one_call_are_judged_each
            a_refused_message_takes_its_call_with_it calls_with_the_same_messages_do_not_lock_each_other_out
            calls_with_the_same_conflicts_do_not_lock_each_other_out message_ids_are_checked_and_kept_exactly
            a_refused_message_does_not_use_up_its_id forgetting_takes_old_ids_only poison_is_kept_and_is_not_to_be_sent
            a_message_wakes_a_waiting_relay a_binary_body_is_kept_exactly what_is_received_is_not_applied
            a_rollback_takes_back_that_a_message_was_applied
        }
    };
    (receiving, $fixture:expr) => {
        $crate::conformance_cases! { receiving, $fixture,
            every_message_is_stored_and_settled nothing_is_settled_while_the_store_is_down
            a_lost_connection_loses_nothing a_lost_settlement_leads_to_a_duplicate a_stop_while_nothing_comes_is_prompt
            a_stop_while_the_store_hangs_loses_nothing poison_harms_nothing_else what_the_store_refuses_is_poison
            duplicates_are_settled_and_stored_once a_conflict_is_kept_out_and_settled
            no_more_are_on_their_way_than_may_be troubles_of_all_kinds_lose_nothing
            messages_are_stored_in_order_where_that_is_claimed
        }
    };
    (replay, $fixture:expr) => {
        $crate::conformance_cases! { replay, $fixture,
            what_was_delivered_goes_out_again each_replay_of_an_event_has_its_own_number
            what_was_skipped_goes_out_if_it_is_wanted_now_or_named
            pending_discarded_and_dead_events_are_passed_over a_range_narrows_a_replay
            a_replay_keeps_the_order_of_each_key
            a_large_replay_goes_in_steps_over_a_range_that_stands bad_replays_are_refused
        }
    };
    (filter, $fixture:expr) => {
        $crate::conformance_cases! { filter, $fixture,
            only_what_is_wanted_comes_by_its_exact_name what_commits_late_passes_the_same_filter
            each_is_judged_by_the_filter_of_its_time what_nobody_wanted_comes_to_the_filter_that_does
            some_kinds_are_not_everything some_aggregates_are_not_everything
            some_headers_are_not_everything operators_mean_what_is_wanted
            what_one_leaves_out_goes_to_another filters_that_no_event_can_pass_are_refused
        }
    };
    (routing, $fixture:expr) => {
        $crate::conformance_cases! { routing, $fixture,
            what_lies_before_the_beginning_is_skipped a_filter_is_that_of_its_time
            a_new_filter_waits_for_what_was_given_out
            a_new_filter_is_taken_after_nothing_was_wanted
            a_new_filter_holds_for_the_next_holder_of_the_lane what_nobody_wants_is_unrouted
            nothing_is_unrouted_where_one_wants_everything a_widened_filter_gets_what_was_unrouted
            a_filter_that_changes_twice_gets_what_was_unrouted a_new_subscription_gets_what_was_unrouted
            what_a_narrowed_filter_leaves_unread_is_unrouted
            what_is_no_longer_everything_is_looked_at
            nothing_is_decided_while_a_lane_has_yet_to_take_its_filter
            an_open_transaction_is_looked_at_once_it_commits
            what_was_unrouted_waits_for_its_time
            what_is_unrouted_is_kept_until_it_is_given_up an_unknown_log_has_nothing_unrouted
            what_was_passed_comes_before_the_new_filter_is_taken
            what_was_passed_comes_to_one_that_takes_everything_now
            what_was_passed_comes_to_the_last_of_several_filters what_is_wanted_now_is_not_given_up
        }
    };
    (settle, $fixture:expr) => {
        $crate::conformance_cases! { settle, $fixture,
            due_rows_settle_while_windows_without_anything_pass a_retry_comes_at_its_time_with_the_next_attempt
            an_uncounted_retry_does_not_raise_the_attempt a_delivered_due_row_is_dispatched
            an_unsettled_due_row_comes_again_after_a_takeover a_mixed_settlement_is_written_whole
            a_partial_settlement_keeps_its_rows_and_gives_the_rest_again
            settling_a_row_that_was_discarded_meanwhile_succeeds settling_a_row_that_was_pruned_meanwhile_succeeds
            an_event_discarded_in_flight_is_not_retried an_event_discarded_before_it_was_read_is_marked
            due_rows_stay_in_their_lane the_earliest_wait_is_reported a_hostile_error_text_is_cut_not_refused
            a_large_due_row_comes_in_spite_of_the_byte_limit what_is_due_for_longest_comes_first
            the_last_attempts_of_an_event_are_kept
            what_was_not_called_is_no_attempt a_replay_keeps_the_attempts_before_it
        }
    };
    (sink, $fixture:expr) => {
        $crate::conformance_cases! { sink, $fixture,
            capabilities_are_usable_and_constant every_delivery_arrives_and_has_one_outcome
            delivering_nothing_gives_nothing payload_bytes_arrive_identical
            a_poison_delivery_does_not_fail_its_neighbours a_failure_stops_the_rest_of_its_key_where_prefix_is_claimed
            a_key_arrives_in_order_where_prefix_is_claimed a_failing_destination_is_tried_once_a_call
            a_throttled_delivery_is_not_the_end_of_an_event a_destination_that_is_down_is_unavailable_until_it_is_back
            a_dropped_call_harms_no_other what_is_too_large_dies_alone calls_at_once_do_not_meet
            attempts_of_an_event_share_their_dedupe_id a_repeated_delivery_is_delivered
            strange_names_arrive_or_are_refused_with_a_code reserved_headers_do_no_harm closing_twice_is_fine
            the_high_water_mark_is_never_behind_what_was_delivered a_trace_has_the_position_where_one_is_claimed
        }
    };
    (source, $fixture:expr) => {
        $crate::conformance_cases! { source, $fixture,
            capabilities_are_usable_and_constant a_message_comes_as_it_was_published next_waits_for_a_message
            next_gives_no_more_than_asked_for no_more_are_unsettled_than_may_be
            an_acknowledged_message_never_comes_again a_lost_connection_loses_no_message what_is_given_back_comes_again
            what_is_rejected_never_comes_again settling_is_idempotent a_dropped_call_loses_no_message
            closing_ends_a_waiting_call messages_come_in_order_where_that_is_claimed
        }
    };
    (skipped, $fixture:expr) => {
        $crate::conformance_cases! { skipped, $fixture,
            what_was_passed_and_not_wanted_is_counted what_nobody_wants_is_not_skipped
            a_skipped_event_that_is_replayed_is_not_skipped_any_more another_filter_changes_nothing_of_the_past
            what_lies_before_the_beginning_is_counted many_are_near_the_truth
        }
    };
    (tail, $fixture:expr) => {
        $crate::conformance_cases! { tail, $fixture,
            what_is_appended_is_seen_once a_transaction_that_commits_late_is_seen a_look_is_bounded_and_goes_on
            only_what_is_meant_is_seen a_look_leaves_no_trace_and_knows_its_place
        }
    };
    (storm, $fixture:expr) => {
        $crate::conformance_cases! { storm, $fixture,
            under_random_writers_nothing_is_lost_and_every_key_stays_in_order
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! conformance_cases {
    ($suite:ident, $fixture:expr, $($case:ident)*) => {
        mod $suite {
            #[allow(unused_imports)]
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    $crate::conformance::$suite::$case(&($fixture)().await).await;
                }
            )*
        }
    };
}

#[cfg(test)]
mod tests {
    /// A case that is written but not listed would never run.
    #[test]
    fn every_case_is_listed_in_its_suite() {
        let arms = include_str!("cases.rs").split("\n    };");
        let suites: Vec<_> = arms.filter_map(|arm| arm.split_once(", $fixture:expr) => {\n")).collect();
        assert!(suites.len() > 30, "{} suites", suites.len());
        for (suite, list) in suites {
            let suite = suite.rsplit('(').next().unwrap_or_default();
            let path = format!("{}/src/conformance/{suite}.rs", env!("CARGO_MANIFEST_DIR"));
            let source = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
            for line in source.lines().filter_map(|line| line.strip_prefix("pub async fn ")) {
                let case = line.split('(').next().unwrap_or_default();
                assert!(list.split_whitespace().any(|word| word == case), "add {case} to {suite} in cases.rs");
            }
        }
    }
}
