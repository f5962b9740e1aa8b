"""What Trainer scripts use equals plain Trainer on every mesh, or is refused by name; docs/support.md says which."""

import pytest

from .support import PATH, document
from .worlds import ALL, run_all


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, str]]:
    return run_all()


@pytest.mark.parametrize("feature", ALL, ids=lambda feature: feature.name.replace("`", ""))
def test_feature(outcomes, feature):
    for mesh in feature.meshes:
        said = outcomes.get(feature.name, {}).get(mesh, "not run: a feature before it failed")
        assert not said.startswith(("DIFFERS", "not run")), f"{mesh}: {said}"


def test_names_are_unique():
    assert len({feature.name for feature in ALL}) == len(ALL)


def test_the_committed_table_is_what_came_out(outcomes):
    assert PATH.read_text() == document(outcomes), "run `python -m tests.matrix.support`"
