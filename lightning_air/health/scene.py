"""What there is to be shown of a run, for whoever shows it: a report, a page, a table."""

from dataclasses import dataclass

from lightning_air.health.events import EventLog
from lightning_air.health.history import History
from lightning_air.health.report import render_report
from lightning_air.health.report_events import is_trouble
from lightning_air.health.step_times import StepTimes


@dataclass(frozen=True)
class Scene:
    """The readings, the events and the steps of a run. Any thread may look at it.

    Attributes:
        history: What the GPUs say.
        events: What happens to them.
        steps: How long the optimizer steps take.
        title: Of what is shown.
    """

    history: History
    events: EventLog
    steps: StepTimes | None = None
    title: str = "GPU health"

    def render(self, *, is_live: bool = False) -> str:
        """Return the report as of now."""
        return render_report(
            self.history.window(),
            self.events.all,
            None if self.steps is None else self.steps.window(),
            poll_seconds=self.history.poll_seconds,
            title=self.title,
            is_live=is_live,
        )

    @property
    def has_news(self) -> bool:
        """Whether a report would say something: on a laptop without a GPU and without trouble it would not."""
        has_gpus = bool(self.history.window(seconds=0).values)
        return has_gpus or any(is_trouble(event.kind) for event in self.events.all)
