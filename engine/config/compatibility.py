"""Which settings go together: each section's rules are asked (section.py)."""

from collections.abc import Iterator

from .run_config import Config
from .section import PlannedRun, rule, rules_of, section_of


def rules(model: type[Config]) -> Iterator[tuple[str, rule]]:
    """Every rule with the name of its section, which is "" for a run's own settings, in the order of asking.

    The loss comes first: what it trains on is the reason that helps most.
    """
    names = [name for name, field in model.model_fields.items() if section_of(field)]
    for name in sorted(["", *names], key=lambda name: name != "loss"):
        section = section_of(model.model_fields[name]) if name else model
        yield from ((name, rule) for rule in rules_of(section))


def check_settings(
    config: Config, device: str | None = None, vllm: str | None = None, ranks: int = 1
) -> None:
    """Raise ValueError for the first rule that refuses the settings.

    device: "cpu" or "cuda". vllm: the installed version. See PlannedRun.
    """
    run = PlannedRun(config, device, vllm, ranks)
    for name, asked in rules(type(config)):
        if message := asked.refusal(getattr(config, name) if name else config, run):
            raise ValueError(f"config: {message}")
