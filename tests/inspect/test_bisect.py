"""The search for the wrong sites, against faults that are known."""

from itertools import combinations

import pytest

from fxrl.inspect.verify import find_blame

SITES = tuple("abcdefgh")


def search(*faults, sites=SITES, **options):
    """A fault is a set of sites that is wrong when all of it is on."""
    calls = []

    def fails(enabled):
        calls.append(enabled)
        return any(set(fault) <= enabled for fault in faults)

    return *find_blame(sites, fails, **options), calls


@pytest.mark.parametrize("fault", SITES)
def test_one_wrong_site(fault):
    blame, note, calls = search(fault)
    assert (blame, note) == ((fault,), "")
    assert len(calls) <= 9, "two trials for each halving, and three to start and to end"
    assert len(set(calls)) == len(calls), "no trial runs twice"


@pytest.mark.parametrize("faults", list(combinations(SITES, 2)))
def test_two_wrong_sites(faults):
    assert search(*faults)[:2] == (faults, "")


@pytest.mark.parametrize("fault", list(combinations(SITES, 2)))
def test_wrong_only_together(fault):
    assert search(fault)[:2] == (fault, "")


def test_all_wrong_and_only_one_site():
    assert search(*SITES)[:2] == (SITES, "")
    assert search("a", sites=("a", "a"))[:2] == (("a",), "")


def test_no_site_is_to_blame():
    assert search("")[:2] == (
        (),
        "the step is wrong with every rewrite left out: the capture is to blame",
    )


def test_a_failure_that_does_not_repeat():
    blame, note, _ = search()
    assert blame == ()
    assert "does not repeat" in note


def test_many_sites_cost_few_trials():
    sites = [f"s{i}" for i in range(72)]
    blame, _, calls = search(("s17",), sites=sites)
    assert blame == ("s17",)
    assert len(calls) <= 17


def test_a_search_that_must_stop_says_so():
    sites = [f"s{i}" for i in range(72)]
    blame, note, calls = search(("s17",), sites=sites, max_trials=6)
    assert len(calls) == 6
    assert note == "the search stopped after 6 trials"
    assert "s17" in blame, "what it had narrowed down to"
    assert len(blame) < 36
    assert search(("a",), max_trials=2)[0] == (), "everything is no finding"
