"""Mini-epochs whose repeats are decided as training goes on: the same by all ranks.

Rank 0 decides by its own metrics, and the others get both from it, so that the states of all ranks
are the same. Where it cannot decide, they learn that as well, and none of them waits for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from dsprep.errors import UsageError, describe
from dsprep.reader.mini_epochs import Policy
from dsprep.reader.options import at_least
from dsprep.reader.ranks import RankInfo


class Adaptive:
    """Decisions so far, and reports of the mini-epoch that is under way.

    Attributes
    ----------
    decided
        The repeats of the mini-epochs that are over.
    reports
        The metrics of each pass of the one that is not.
    """

    def __init__(self, policy: Policy, rank_info: RankInfo, comm: Any) -> None:
        self._policy, self._rank_info, self._comm = policy, rank_info, comm
        self.decided: tuple[int, ...] = ()
        self.reports: list[dict[str, float]] = []

    @property
    def reported(self) -> int:
        """Passes of which metrics were reported."""
        return sum(self.decided) + len(self.reports)

    def report(self, metrics: Mapping[str, Any], ready: bool = True) -> bool:
        """Take the metrics of a pass; return whether it was the last one of its mini-epoch.

        It is not unless rank 0 has the next one `ready`.

        Raises `UsageError` if rank 0 cannot decide by its metrics, or cannot be heard.
        """
        own_report: tuple[dict[str, float], bool] | str | None = None
        failure = None
        if self._rank_info.rank == 0:
            try:
                report = {name: _number(name, value) for name, value in metrics.items()}
                own_report = report, ready and bool(self._policy.enough([*self.reports, report]))
            except Exception as error:
                own_report, failure = describe(error), error
        shared = self._agreed(own_report)
        if failure is not None:
            raise failure
        if not isinstance(shared, tuple):
            raise UsageError(f"rank 0 could not decide about repeats: {shared}")
        report, enough = shared
        reports = [*self.reports, report]
        self.reports = [] if enough else reports
        if enough:
            self.decided = (*self.decided, len(reports))
        return bool(enough)

    def _agreed(self, own_report: Any) -> Any:
        """Return the decision of rank 0."""
        if self._rank_info.world_size == 1:
            return own_report
        if self._comm is not None:
            return self._comm.bcast(own_report, root=0)
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_available():
            distributed = torch.distributed
            if distributed.is_initialized():
                message = [own_report]
                distributed.broadcast_object_list(message, src=0)
                return message[0]
        raise UsageError(
            f"the {self._rank_info.world_size} ranks have no way to agree on repeats",
            fix="give comm= an mpi4py communicator, or call torch.distributed.init_process_group",
        )

    def state(self) -> dict[str, Any]:
        """Return the state for `load`, as JSON."""
        return {"repeats": list(self.decided), "reports": self.reports}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was called; raise `UsageError` if it is damaged."""
        try:
            decided = tuple(at_least("repeats", n, 1, 1 << 32) for n in state["repeats"])
            reports = [{str(k): float(v) for k, v in r.items()} for r in state["reports"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"the state of the reader is damaged: {error}") from error
        self.decided, self.reports = decided, reports


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the metric {name} is {value!r}", expected="a number") from error
