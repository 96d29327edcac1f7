"""What a check must say of itself, and in which order findings are read."""

from __future__ import annotations

import pytest

from paceline.checks.findings import CHECKS, Finding, Status, check, exit_code, worst_first


def told(status: Status) -> Finding:
    return Finding(check="a", status=status, where="", text="")


def test_a_check_describes_itself() -> None:
    @check("a-test-of-checks")
    def look() -> None:
        """A title.

        What it looks at
            One thing,
            and another.

        Why it matters
            It breaks.

        How to mend it
            By hand.
        """

    try:
        found = CHECKS["a-test-of-checks"]
        assert found.title == "A title." and found.sections["What it looks at"] == "One thing,\nand another."
        with pytest.raises(ValueError, match="two checks are called a-test-of-checks"):
            check("a-test-of-checks")(look)
    finally:
        del CHECKS["a-test-of-checks"]


def test_a_check_that_does_not_is_refused() -> None:
    def look() -> None:
        """A title.

        What it looks at
            One thing.

        Why it matters

        How to mend it
            By hand.
        """

    with pytest.raises(ValueError, match="lacks Why it matters"):
        check("another")(look)
    with pytest.raises(ValueError, match="lacks What it looks at"):
        check("another")(lambda: None)


def test_the_worst_comes_first_and_decides() -> None:
    found = [told(status) for status in ("ok", "warning", "skipped", "failure", "crashed")]
    assert [finding.status for finding in worst_first(found)] == ["failure", "crashed", "warning", "skipped", "ok"]
    assert exit_code(found, is_strict=False) == 2
    assert exit_code(found[:3], is_strict=False) == 0 and exit_code(found[:3], is_strict=True) == 1
    assert exit_code([told("crashed")], is_strict=True) == 1 and exit_code([], is_strict=True) == 0
