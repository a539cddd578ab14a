"""Which tests cover which fault: one row each for what may go wrong with ids, files, the system, the process, and data."""

from __future__ import annotations

import ast
from pathlib import Path

# fault → the tests that cover it, as file::function; a fault of a later part has no row yet
COVERAGE: dict[str, list[str]] = {
    "ids: out of range, INT64_MIN, uint64 ≥ 2⁶³": [
        "test_feature::test_what_is_no_index",
        "test_reader::test_rows_out_of_range",
        "test_rowmap::test_ids_out_of_range_are_named",
    ],
    "ids: float, complex, object, string, NaN; mask of the wrong length": [
        "test_feature::test_what_is_no_index",
        "test_feature::test_masks",
    ],
    "ids: empty, duplicates, unsorted, 2-D, strided, byte-swapped, any width, list, slice": [
        "test_feature::test_arrays_of_ids",
        "test_feature::test_ints_and_slices",
        "test_feature::test_the_index_shape_leads",
        "test_feature::test_empty_reads_nothing",
        "test_reader::test_gather_matches_numpy",
    ],
    "ids: out= of wrong shape, dtype, stride, device, read-only": [
        "test_feature::test_out_must_fit",
        "test_feature::test_memory_that_cannot_be_written_is_refused",
    ],
    "ids: a batch larger than the cache or the budget": [
        "test_cache_table::test_any_batches_any_capacity",
        "test_loader::test_a_budget_too_small_names_the_least",
        "test_pipeline::test_a_batch_that_never_fits_is_an_error_and_no_hang",
        "test_reader::test_the_budget_names_the_least_that_works",
    ],
    "files: truncated or longer; a bit flipped anywhere; padding changed": [
        "test_faults_storage::test_flipped_bits_are_found_or_harmless",
        "test_faults_storage::test_ten_thousand_flipped_bits_are_found_or_harmless",
        "test_faults_storage::test_verify_finds_every_flipped_bit",
        "test_faults_storage::test_truncation_at_every_boundary_is_found",
        "test_faults_storage::test_without_checksums_flipped_bits_are_silently_wrong",
        "test_catalog::test_any_flipped_bit_is_found",
        "test_verify_pack::test_any_flipped_bit_is_found",
        "test_verify_pack::test_files_that_are_cut_off_longer_empty_or_links",
        "test_catalog::test_truncation_at_every_page_and_around",
        "test_reader::test_a_flipped_bit_is_found",
    ],
    "files: extents swapped; an old copy put back": [
        "test_damaged_dataset::test_files_swapped_and_older_copies_are_found",
        "test_catalog::test_an_older_copy_of_a_value_under_another_key",
        "test_locks::test_generations_are_in_the_seed",
    ],
    "files: wrong magic, newer version, other byte order": [
        "test_format::test_hostile_header_is_refused",
        "test_catalog::test_hostile_values_are_refused",
    ],
    "files: dimensions that overflow, header length of 4 GB, zero": [
        "test_format::test_hostile_header_is_refused",
        "test_format::test_arbitrary_bytes_are_never_a_header",
        "test_format::test_arbitrary_fields_under_a_right_checksum_parse_or_are_refused",
        "test_create::test_hostile_npy_files",
        "test_catalog::test_hostile_pages_under_a_right_digest",
    ],
    "files: missing; no permission; a directory, FIFO or device; .., absolute, symlink": [
        "test_damaged_dataset::test_nothing_there",
        "test_damaged_dataset::test_other_things_in_a_files_place",
        "test_damaged_dataset::test_paths_that_lead_outside",
        "test_format::test_only_regular_files_are_opened",
        "test_format::test_names_stay_inside",
        "test_format::test_names_do_not_pass_through_links",
        "test_catalog::test_something_else_in_its_place",
    ],
    "files: indptr not monotone, last ≠ nnz, neighbour id ≥ N": [
        "test_create::test_bad_offsets_are_found_before_anything_is_made",
        "test_create::test_an_id_that_is_no_node_is_named",
        "test_damaged_dataset::test_verify_checks_the_adjacency_itself",
        "test_edge_index::test_wrong_edges_are_refused_and_leave_nothing",
    ],
    "files: unlinked, replaced or shrunk while open": [
        "test_reader::test_an_unlinked_file_goes_on",
        "test_reader::test_a_file_shrunk_while_open_is_an_error_not_a_loop",
        "test_dataset::test_a_replaced_dataset_goes_on_until_it_is_opened_again",
        "test_replacing::test_some_hundred_opens_of_a_dataset_that_is_replaced_without_pause",
        "test_replacing::test_ten_thousand_opens_of_a_dataset_that_is_replaced_without_pause",
        "test_faults_storage::test_files_that_shrink_while_they_are_open",
    ],
    "files: a pickle anywhere": [
        "test_layers::test_no_pickle",
        "test_create::test_npy_of_pickles_is_never_loaded",
    ],
    "system: ENOSPC, EDQUOT, EFBIG at every write and commit; EIO on read or fsync": [
        "test_faults::test_create_fails_whole",
        "test_faults::test_create_fails_whole_everywhere",
        "test_faults::test_replace_keeps_old_or_new",
        "test_faults::test_create_under_a_file_size_limit",
        "test_commit_faults::test_some_failing_calls",
        "test_commit_faults::test_every_failing_call",
        "test_commit_faults::test_what_follows_the_catalogs_rename_removes_nothing_that_it_names",
        "test_faults_writers::test_failing_calls_of_a_builder",
        "test_faults_writers::test_every_failing_call_of_a_reader",
        "test_edge_index::test_a_full_disk_while_spilling",
        "test_aggregate::test_makers_killed_and_failed_at_a_system_call",
        "test_aggregate::test_makers_killed_and_failed_at_every_system_call",
        "test_superbatch_faults::test_run_files_that_cannot_be_written",
        "test_superbatch_faults::test_run_files_that_cannot_be_written_anywhere",
        "test_reader::test_a_device_error_at_any_read",
    ],
    "system: short read or write, EINTR, EAGAIN, full completion queue": [
        "test_faults::test_create_goes_on_after_short_and_interrupted_writes",
        "test_faults::test_pread_gather_meets_errors_and_short_reads",
        "test_reader::test_distorted_completions_are_continued",
        "test_reader::test_endless_end_of_file_ends",
        "test_faults_storage::test_reads_of_nothing_end",
        "test_format::test_short_writes_go_on_at_the_exact_byte",
    ],
    "system: EMFILE; no memory at the k-th allocation; memory cgroup": [
        "test_faults::test_open_and_use_fail_cleanly",
        "test_faults::test_too_few_descriptors",
        "test_faults::test_every_large_allocation_may_fail",
        "test_faults::test_dataset_larger_than_its_memory_group",
        "test_passes::test_the_process_grows_by_no_more_than_the_budget",
    ],
    "system: io_uring refused (ENOSYS, EPERM, ENOMEM)": [
        "test_refused_rings::test_refused_from_the_start",
        "test_refused_rings::test_refused_later",
        "test_played_ring::test_a_kernel_that_refuses_for_ever_is_an_error",
        "test_reader::test_backend_by_name_is_a_demand_and_auto_says_why",
    ],
    "process: kill −9 at every system call of create and commit": [
        "test_faults::test_killed_writers_lose_nothing",
        "test_faults::test_killed_writers_lose_nothing_at_any_call",
        "test_faults_writers::test_builders_killed_at_every_system_call",
        "test_faults_writers::test_updates_killed_at_every_system_call",
        "test_faults_writers::test_writers_killed_at_a_system_call",
        "test_aggregate::test_makers_killed_and_failed_at_a_system_call",
        "test_aggregate::test_makers_killed_and_failed_at_every_system_call",
        "test_infer::test_runs_killed_at_a_system_call",
        "test_infer::test_runs_killed_at_every_system_call",
    ],
    "process: kill −9 at random points of an epoch, and at every system call on a run file": [
        "test_superbatch_faults::test_killed_epochs_leave_what_the_next_run_sweeps",
        "test_superbatch_faults::test_a_hundred_killed_epochs",
        "test_superbatch_faults::test_epochs_killed_at_every_call_on_a_run_file",
    ],
    "process: power cut": [
        "test_faults_writers::test_a_power_cut_after_create_loses_nothing_and_each_fsync_is_needed",
        "test_faults_writers::test_a_power_cut_at_any_time_leaves_the_old_or_the_new",
    ],
    "process: a second writer; a dead writer's lock": [
        "test_faults_writers::test_a_second_builder_in_another_process",
        "test_locks::test_writers_exclude_each_other_and_readers_share",
        "test_locks::test_a_dead_writers_lock_is_gone_with_it",
        "test_build_directory::test_two_builders_of_one_place",
    ],
    "process: fork or spawn with a store open or reads in flight; DataLoader workers": [
        "test_reader::test_a_forked_child_reads_with_queues_of_its_own",
        "test_feature::test_dataloader_workers",
        "test_feature::test_pickle_is_path_and_options",
        "test_dataset::test_a_graph_in_another_process",
        "test_cache_table::test_a_forked_child_reads_right_and_leaves_its_parent_alone",
        "test_train::test_a_loader_in_a_forked_child",
    ],
    "process: gather ∥ cache update ∥ close ∥ collection; Ctrl-C; interpreter exit": [
        "test_reader::test_close_drains_and_later_calls_are_refused",
        "test_reader::test_threads_share_a_file",
        "test_reader::test_ctrl_c_stops_a_long_gather",
        "test_cache_table::test_threads_share_a_cache",
        "test_cache_faults::test_an_interrupt_between_two_steps_of_an_admission",
        "test_dataset::test_a_graph_that_nobody_closed_makes_no_noise_at_exit",
        "test_loader::test_collected_in_a_cycle",
        "test_loader::test_ctrl_c_while_waiting",
        "test_passes::test_ctrl_c_while_rows_are_added",
        "test_interrupts::test_ctrl_c_ends_a_training_loop",
        "test_interrupts::test_ctrl_c_at_any_moment",
        "test_commit_faults::test_ctrl_c_after_any_step_leaves_the_old_or_the_new",
    ],
    "process: a copy to a device fails, or is interrupted, under way; memory that cannot be pinned": [
        "test_transfer::test_host_memory_goes_back_once_the_copy_is_complete",
        "test_pinned::test_memory_that_cannot_be_locked_is_ordinary_and_said_once",
        "test_loader::test_errors_of_a_transfer",
        "test_interrupts::test_ctrl_c_at_any_moment",
    ],
    "process: a policy that raises, returns the wrong type, out-of-range or duplicate rows": [
        "test_cache_table::test_faulty_static_policies",
        "test_cache_faults::test_faulty_victims",
        "test_cache_faults::test_raising_hooks",
        "test_contract_suites::test_faulty_online_policies_fail",
        "test_contract_suites::test_faulty_static_policies_fail",
    ],
    "data: NaN payloads, −0.0, Inf, denormals; N = 0; D = 1; any width": [
        "test_feature::test_every_dtype_and_width",
        "test_create::test_every_dtype_bit_for_bit_from_a_tensor",
        "test_dataset::test_an_empty_graph",
        "test_reader::test_gather_matches_numpy",
    ],
    "data: > 2³¹ rows; > 4 GiB files": [
        "test_huge::test_rows_beyond_32_bits",
        "test_huge::test_damage_beyond_32_bits",
        "test_edge_index::test_ids_of_eight_bytes",
    ],
}


def test_table_names_tests_that_exist() -> None:
    folder = Path(__file__).parent
    known = {
        f"{path.stem}::{node.name}"
        for path in folder.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    }
    named = {name for names in COVERAGE.values() for name in names}
    assert not named - known
    assert all(COVERAGE.values())
