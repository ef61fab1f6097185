"""The first cases of three fuzzers, with a fixed seed. `make faults` runs all fuzzers."""

import itertools

import pytest
from faults import data_files, overrides, run_directories

pytestmark = pytest.mark.usefixtures("isolate_registries")


@pytest.mark.parametrize(
    ("fuzzer", "count"), [(overrides, 500), (data_files, 400), (run_directories, 10)]
)
def test_fuzzed_cases_give_right_results_or_one_line_errors(fuzzer, count):
    for case in itertools.islice(fuzzer.cases(seed=0), count):
        fuzzer.check(case)


def test_cases_depend_only_on_the_seed():
    for fuzzer in (overrides, data_files):
        first, again, other = (
            [str(case) for case in itertools.islice(fuzzer.cases(seed), 20)] for seed in (3, 3, 4)
        )
        assert first == again != other
