"""Tests that cover faults: one row each for what may go wrong with ids, files, the system, the process, and data."""

from __future__ import annotations

import re
from pathlib import Path

# A fault, and below it the tests that cover it: of each file (tests/<room>/test_….py) its functions.
COVERAGE = """
ids: out of range, INT64_MIN, uint64 ≥ 2⁶³
    graph/feature: test_what_is_no_index; storage/reader: test_rows_out_of_range; cache/rowmap:
    test_ids_out_of_range_are_named
ids: float, complex, object, string, NaN; mask of the wrong length
    graph/feature: test_what_is_no_index, test_masks
ids: empty, duplicates, unsorted, 2-D, strided, byte-swapped, any width, list, slice
    graph/feature: test_arrays_of_ids, test_ints_and_slices, test_the_index_shape_leads, test_empty_reads_nothing;
    storage/reader: test_gather_matches_numpy
ids: out= of wrong shape, dtype, stride, device, read-only
    graph/feature: test_out_must_fit, test_memory_that_cannot_be_written_is_refused
ids: a batch larger than the cache or the budget
    cache/table: test_any_batches_any_capacity; load/loader: test_a_budget_too_small_names_the_least; load/pipeline:
    test_a_batch_that_never_fits_is_an_error_and_no_hang; storage/reader: test_the_budget_names_the_least_that_works
files: truncated or longer; a bit flipped anywhere; padding changed
    storage/faults_storage: test_flipped_bits_are_found_or_harmless,
    test_ten_thousand_flipped_bits_are_found_or_harmless, test_verify_finds_every_flipped_bit,
    test_truncation_at_every_boundary_is_found, test_without_checksums_flipped_bits_are_silently_wrong; storage/catalog:
    test_any_flipped_bit_is_found, test_truncation_at_every_page_and_around; pack/verify: test_any_flipped_bit_is_found,
    test_files_that_are_cut_off_longer_empty_or_links; storage/reader: test_a_flipped_bit_is_found; campaigns/damage:
    test_damage_is_found_or_harmless, test_a_hundred_thousand_damages_are_found_or_harmless,
    test_without_checksums_data_are_silently_wrong, test_deaths_and_what_goes_unseen_are_noticed
files: extents swapped; an old copy put back
    graph/damaged_dataset: test_files_swapped_and_older_copies_are_found; storage/catalog:
    test_an_older_copy_of_a_value_under_another_key; storage/lock: test_generations_are_in_the_seed
files: wrong magic, newer version, other byte order
    storage/format: test_hostile_header_is_refused; storage/catalog: test_hostile_values_are_refused
files: dimensions that overflow, header length of 4 GB, zero
    storage/format: test_hostile_header_is_refused, test_arbitrary_bytes_are_never_a_header,
    test_arbitrary_fields_under_a_right_checksum_parse_or_are_refused; creation/build: test_hostile_npy_files;
    storage/catalog: test_hostile_pages_under_a_right_digest; campaigns/hostile: test_sizes_that_are_not_so,
    test_depth_and_what_unpacks_to_much; campaigns/fuzz: test_the_corpus_is_replayed, test_inputs_made_of_the_corpus
files: missing; no permission; a directory, FIFO or device; .., absolute, symlink
    graph/damaged_dataset: test_nothing_there, test_other_things_in_a_files_place, test_paths_that_lead_outside;
    storage/format: test_only_regular_files_are_opened, test_names_stay_inside, test_names_do_not_pass_through_links;
    storage/catalog: test_something_else_in_its_place; campaigns/hostile: test_other_things_in_the_place_of_files,
    test_names_that_lead_elsewhere, test_what_hard_links_lead_to_is_not_written
files: indptr not monotone, last ≠ nnz, neighbour id ≥ N
    creation/build: test_bad_offsets_are_found_before_anything_is_made, test_an_id_that_is_no_node_is_named;
    graph/damaged_dataset: test_verify_checks_the_adjacency_itself; creation/extsort:
    test_wrong_edges_are_refused_and_leave_nothing
files: unlinked, replaced or shrunk while open
    storage/reader: test_an_unlinked_file_goes_on, test_a_file_shrunk_while_open_is_an_error_not_a_loop; graph/dataset:
    test_a_replaced_dataset_goes_on_until_it_is_opened_again; storage/replacing:
    test_some_hundred_opens_of_a_dataset_that_is_replaced_without_pause,
    test_ten_thousand_opens_of_a_dataset_that_is_replaced_without_pause; storage/faults_storage:
    test_files_that_shrink_while_they_are_open
files: a pickle anywhere
    system/layers: test_no_pickle; creation/build: test_npy_of_pickles_is_never_loaded; campaigns/hostile: test_nothing_is_run
system: ENOSPC, EDQUOT, EFBIG at every write and commit; EIO on read or fsync
    system/faults: test_create_under_a_file_size_limit; campaigns/failing_calls: test_some_failing_calls,
    test_every_failing_call; storage/commit_faults: test_what_follows_the_catalogs_rename_removes_nothing_that_it_names;
    creation/extsort: test_a_full_disk_while_spilling; plan/superbatch_faults: test_run_files_that_cannot_be_written,
    test_run_files_that_cannot_be_written_anywhere; storage/reader: test_a_device_error_at_any_read; campaigns/full_drives:
    test_some_operations_on_drives_that_run_full, test_every_operation_on_a_drive_that_runs_full; adapters/datasets_arrays:
    test_every_failing_read_of_an_archive_is_an_io_error_with_its_path
system: short read or write, EINTR, EAGAIN, full completion queue
    system/faults: test_create_goes_on_after_short_and_interrupted_writes,
    test_pread_gather_meets_errors_and_short_reads; storage/reader: test_distorted_completions_are_continued,
    test_endless_end_of_file_ends; storage/faults_storage: test_reads_of_nothing_end; storage/format:
    test_short_writes_go_on_at_the_exact_byte
system: EMFILE; no memory at the k-th allocation; memory cgroup
    system/faults: test_too_few_descriptors, test_dataset_larger_than_its_memory_group; campaigns/failing_calls:
    test_every_failing_call; campaigns/allocations: test_some_allocations_fail, test_every_allocation_fails,
    test_allocations_of_epochs_may_fail, test_every_allocation_of_epochs_may_fail;
    graph/passes: test_the_process_grows_by_no_more_than_the_budget
system: io_uring refused (ENOSYS, EPERM, ENOMEM)
    storage/refused_rings: test_refused_from_the_start, test_refused_later; core/played_ring:
    test_a_kernel_that_refuses_for_ever_is_an_error; storage/reader: test_backend_by_name_is_a_demand_and_auto_says_why
process: kill −9 at every system call and at random moments of every operation
    campaigns/kills: test_some_operations_killed_at_some_calls, test_every_operation_killed_at_every_call,
    test_every_operation_killed_at_random_moments
process: power cut
    campaigns/journal: test_power_cuts_of_some_operations, test_power_cuts_of_every_operation,
    test_without_a_flush_power_cuts_are_noticed; campaigns/power_cuts: test_power_cuts_of_some_operations,
    test_every_operation_ended_at_every_call, test_without_any_flush_power_cuts_are_noticed
process: a second writer; a dead writer's lock
    storage/faults_writers: test_a_second_builder_in_another_process; storage/lock:
    test_writers_exclude_each_other_and_readers_share, test_a_dead_writers_lock_is_gone_with_it; storage/builddir:
    test_two_builders_of_one_place
process: fork or spawn with a store open or reads in flight; DataLoader workers
    storage/reader: test_a_forked_child_reads_with_queues_of_its_own; graph/feature: test_dataloader_workers,
    test_pickle_is_path_and_options; graph/dataset: test_a_graph_in_another_process; cache/table:
    test_a_forked_child_reads_right_and_leaves_its_parent_alone; load/train: test_a_loader_in_a_forked_child
process: gather ∥ cache update ∥ close ∥ collection; Ctrl-C; interpreter exit
    storage/reader: test_close_drains_and_later_calls_are_refused, test_threads_share_a_file,
    test_ctrl_c_stops_a_long_gather; cache/table: test_threads_share_a_cache; cache/cache_faults:
    test_an_interrupt_between_two_steps_of_an_admission; graph/dataset:
    test_a_graph_that_nobody_closed_makes_no_noise_at_exit; load/loader: test_collected_in_a_cycle,
    test_ctrl_c_while_waiting; graph/passes: test_ctrl_c_while_rows_are_added; campaigns/interrupts:
    test_ctrl_c_ends_a_training_loop, test_ctrl_c_at_any_moment, test_ctrl_c_in_some_operations,
    test_ctrl_c_at_every_call_of_every_operation, test_ctrl_c_at_many_moments_of_every_operation
process: a copy to a device fails, or is interrupted, under way; memory that cannot be pinned
    load/transfer: test_host_memory_goes_back_once_the_copy_is_complete; gather/pinned:
    test_memory_that_cannot_be_locked_is_ordinary_and_said_once; load/loader: test_errors_of_a_transfer;
    campaigns/interrupts: test_ctrl_c_at_any_moment
process: a policy that raises, returns the wrong type, out-of-range or duplicate rows
    cache/table: test_faulty_static_policies; cache/cache_faults: test_faulty_victims, test_raising_hooks;
    testing/policies: test_faulty_online_policies_fail, test_faulty_static_policies_fail
data: NaN payloads, −0.0, Inf, denormals; N = 0; D = 1; any width
    graph/feature: test_every_dtype_and_width; creation/build: test_every_dtype_bit_for_bit_from_a_tensor;
    graph/dataset: test_an_empty_graph; storage/reader: test_gather_matches_numpy
data: > 2³¹ rows; > 4 GiB files
    storage/huge: test_rows_beyond_32_bits, test_damage_beyond_32_bits; creation/extsort: test_ids_of_eight_bytes
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
    return {fault: {f"{file}::{name}" for file, names in row for name in names.split(", ")} for fault, row in files.items()}


def test_table_names_tests_that_exist() -> None:
    folder = Path(__file__).resolve().parents[1]
    known = {
        f"{path.parent.name}/{path.stem.removeprefix('test_')}::{name}"
        for path in folder.glob("*/test_*.py")
        for name in re.findall(r"^ *def (test\w+)\(", path.read_text(), re.MULTILINE)
    }
    assert len(coverage()) > 25
    for fault, names in coverage().items():
        assert names, fault
        assert not names - known, fault
