"""Which tests cover which fault: one row each for what may go wrong with ids, files, the system, the process, and data."""

from __future__ import annotations

import ast
from pathlib import Path

# A fault, and below it the tests that cover it: of each file (tests/test_….py) its functions.
COVERAGE = """
ids: out of range, INT64_MIN, uint64 ≥ 2⁶³
    feature: test_what_is_no_index; reader: test_rows_out_of_range; rowmap: test_ids_out_of_range_are_named
ids: float, complex, object, string, NaN; mask of the wrong length
    feature: test_what_is_no_index, test_masks
ids: empty, duplicates, unsorted, 2-D, strided, byte-swapped, any width, list, slice
    feature: test_arrays_of_ids, test_ints_and_slices, test_the_index_shape_leads, test_empty_reads_nothing; reader:
    test_gather_matches_numpy
ids: out= of wrong shape, dtype, stride, device, read-only
    feature: test_out_must_fit, test_memory_that_cannot_be_written_is_refused
ids: a batch larger than the cache or the budget
    cache_table: test_any_batches_any_capacity; loader: test_a_budget_too_small_names_the_least; pipeline:
    test_a_batch_that_never_fits_is_an_error_and_no_hang; reader: test_the_budget_names_the_least_that_works
files: truncated or longer; a bit flipped anywhere; padding changed
    faults_storage: test_flipped_bits_are_found_or_harmless, test_ten_thousand_flipped_bits_are_found_or_harmless,
    test_verify_finds_every_flipped_bit, test_truncation_at_every_boundary_is_found,
    test_without_checksums_flipped_bits_are_silently_wrong; catalog: test_any_flipped_bit_is_found,
    test_truncation_at_every_page_and_around; verify_pack: test_any_flipped_bit_is_found,
    test_files_that_are_cut_off_longer_empty_or_links; reader: test_a_flipped_bit_is_found
files: extents swapped; an old copy put back
    damaged_dataset: test_files_swapped_and_older_copies_are_found; catalog:
    test_an_older_copy_of_a_value_under_another_key; locks: test_generations_are_in_the_seed
files: wrong magic, newer version, other byte order
    format: test_hostile_header_is_refused; catalog: test_hostile_values_are_refused
files: dimensions that overflow, header length of 4 GB, zero
    format: test_hostile_header_is_refused, test_arbitrary_bytes_are_never_a_header,
    test_arbitrary_fields_under_a_right_checksum_parse_or_are_refused; create: test_hostile_npy_files; catalog:
    test_hostile_pages_under_a_right_digest
files: missing; no permission; a directory, FIFO or device; .., absolute, symlink
    damaged_dataset: test_nothing_there, test_other_things_in_a_files_place, test_paths_that_lead_outside; format:
    test_only_regular_files_are_opened, test_names_stay_inside, test_names_do_not_pass_through_links; catalog:
    test_something_else_in_its_place
files: indptr not monotone, last ≠ nnz, neighbour id ≥ N
    create: test_bad_offsets_are_found_before_anything_is_made, test_an_id_that_is_no_node_is_named; damaged_dataset:
    test_verify_checks_the_adjacency_itself; edge_index: test_wrong_edges_are_refused_and_leave_nothing
files: unlinked, replaced or shrunk while open
    reader: test_an_unlinked_file_goes_on, test_a_file_shrunk_while_open_is_an_error_not_a_loop; dataset:
    test_a_replaced_dataset_goes_on_until_it_is_opened_again; replacing:
    test_some_hundred_opens_of_a_dataset_that_is_replaced_without_pause,
    test_ten_thousand_opens_of_a_dataset_that_is_replaced_without_pause; faults_storage:
    test_files_that_shrink_while_they_are_open
files: a pickle anywhere
    layers: test_no_pickle; create: test_npy_of_pickles_is_never_loaded
system: ENOSPC, EDQUOT, EFBIG at every write and commit; EIO on read or fsync
    faults: test_create_fails_whole, test_create_fails_whole_everywhere, test_replace_keeps_old_or_new,
    test_create_under_a_file_size_limit; commit_faults: test_some_failing_calls, test_every_failing_call,
    test_what_follows_the_catalogs_rename_removes_nothing_that_it_names; faults_writers: test_failing_calls_of_a_builder,
    test_every_failing_call_of_a_reader; edge_index: test_a_full_disk_while_spilling; aggregate:
    test_makers_killed_and_failed_at_a_system_call, test_makers_killed_and_failed_at_every_system_call; superbatch_faults:
    test_run_files_that_cannot_be_written, test_run_files_that_cannot_be_written_anywhere; reader:
    test_a_device_error_at_any_read
system: short read or write, EINTR, EAGAIN, full completion queue
    faults: test_create_goes_on_after_short_and_interrupted_writes, test_pread_gather_meets_errors_and_short_reads; reader:
    test_distorted_completions_are_continued, test_endless_end_of_file_ends; faults_storage: test_reads_of_nothing_end;
    format: test_short_writes_go_on_at_the_exact_byte
system: EMFILE; no memory at the k-th allocation; memory cgroup
    faults: test_open_and_use_fail_cleanly, test_too_few_descriptors, test_every_large_allocation_may_fail,
    test_dataset_larger_than_its_memory_group; passes: test_the_process_grows_by_no_more_than_the_budget
system: io_uring refused (ENOSYS, EPERM, ENOMEM)
    refused_rings: test_refused_from_the_start, test_refused_later; played_ring:
    test_a_kernel_that_refuses_for_ever_is_an_error; reader: test_backend_by_name_is_a_demand_and_auto_says_why
process: kill −9 at every system call of create and commit
    faults: test_killed_writers_lose_nothing, test_killed_writers_lose_nothing_at_any_call; faults_writers:
    test_builders_killed_at_every_system_call, test_updates_killed_at_every_system_call,
    test_writers_killed_at_a_system_call; aggregate: test_makers_killed_and_failed_at_a_system_call,
    test_makers_killed_and_failed_at_every_system_call; infer: test_runs_killed_at_a_system_call,
    test_runs_killed_at_every_system_call
process: kill −9 at random points of an epoch, and at every system call on a run file
    superbatch_faults: test_killed_epochs_leave_what_the_next_run_sweeps, test_a_hundred_killed_epochs,
    test_epochs_killed_at_every_call_on_a_run_file
process: power cut
    faults_writers: test_a_power_cut_after_create_loses_nothing_and_each_fsync_is_needed,
    test_a_power_cut_at_any_time_leaves_the_old_or_the_new
process: a second writer; a dead writer's lock
    faults_writers: test_a_second_builder_in_another_process; locks: test_writers_exclude_each_other_and_readers_share,
    test_a_dead_writers_lock_is_gone_with_it; build_directory: test_two_builders_of_one_place
process: fork or spawn with a store open or reads in flight; DataLoader workers
    reader: test_a_forked_child_reads_with_queues_of_its_own; feature: test_dataloader_workers,
    test_pickle_is_path_and_options; dataset: test_a_graph_in_another_process; cache_table:
    test_a_forked_child_reads_right_and_leaves_its_parent_alone; train: test_a_loader_in_a_forked_child
process: gather ∥ cache update ∥ close ∥ collection; Ctrl-C; interpreter exit
    reader: test_close_drains_and_later_calls_are_refused, test_threads_share_a_file, test_ctrl_c_stops_a_long_gather;
    cache_table: test_threads_share_a_cache; cache_faults: test_an_interrupt_between_two_steps_of_an_admission; dataset:
    test_a_graph_that_nobody_closed_makes_no_noise_at_exit; loader: test_collected_in_a_cycle, test_ctrl_c_while_waiting;
    passes: test_ctrl_c_while_rows_are_added; interrupts: test_ctrl_c_ends_a_training_loop, test_ctrl_c_at_any_moment;
    commit_faults: test_ctrl_c_after_any_step_leaves_the_old_or_the_new
process: a copy to a device fails, or is interrupted, under way; memory that cannot be pinned
    transfer: test_host_memory_goes_back_once_the_copy_is_complete; pinned:
    test_memory_that_cannot_be_locked_is_ordinary_and_said_once; loader: test_errors_of_a_transfer; interrupts:
    test_ctrl_c_at_any_moment
process: a policy that raises, returns the wrong type, out-of-range or duplicate rows
    cache_table: test_faulty_static_policies; cache_faults: test_faulty_victims, test_raising_hooks; contract_suites:
    test_faulty_online_policies_fail, test_faulty_static_policies_fail
data: NaN payloads, −0.0, Inf, denormals; N = 0; D = 1; any width
    feature: test_every_dtype_and_width; create: test_every_dtype_bit_for_bit_from_a_tensor; dataset: test_an_empty_graph;
    reader: test_gather_matches_numpy
data: > 2³¹ rows; > 4 GiB files
    huge: test_rows_beyond_32_bits, test_damage_beyond_32_bits; edge_index: test_ids_of_eight_bytes
"""


def coverage() -> dict[str, set[str]]:
    """Read the table: the tests of each fault, as file::function."""
    rows, fault = dict[str, str](), ""
    for line in COVERAGE.strip().splitlines():
        if not line.startswith(" "):
            fault, rows[line] = line, ""
        else:
            rows[fault] += line.removeprefix("   ")
    files = {fault: [part.split(": ") for part in row.strip().split("; ")] for fault, row in rows.items()}
    return {fault: {f"test_{file}::{name}" for file, names in row for name in names.split(", ")} for fault, row in files.items()}


def test_table_names_tests_that_exist() -> None:
    folder = Path(__file__).parent
    known = {
        f"{path.stem}::{node.name}"
        for path in folder.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    }
    assert len(coverage()) > 25
    for fault, names in coverage().items():
        assert names, fault
        assert not names - known, fault
