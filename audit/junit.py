"""JUnit's XML, which CI systems show: a suite of cases, each passed or failed with a message."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from ..files.reading import printable
from .report import Report


@dataclass(frozen=True)
class Case:
    """One thing that was asked. failure: why it failed, or "" where it passed."""

    name: str
    failure: str = ""


def junit(suite: str, cases: Sequence[Case]) -> str:
    """The suite as XML, one <testcase> for each case."""
    failures = str(sum(bool(case.failure) for case in cases))
    counts = {"tests": str(len(cases)), "failures": failures, "errors": "0"}
    root = ElementTree.Element("testsuites", counts)
    listed = ElementTree.SubElement(root, "testsuite", {"name": printable(suite)} | counts)
    for case in cases:
        element = ElementTree.SubElement(
            listed, "testcase", {"classname": printable(suite), "name": printable(case.name)}
        )
        if case.failure:
            # The XML of a control character would be no XML.
            message = printable(case.failure, keep="")
            ElementTree.SubElement(element, "failure", {"message": message}).text = message
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def audit_cases(report: Report, verdict: str, tolerances: dict[str, bool]) -> list[Case]:
    """The cases of an audit: its outcome, each tolerance that was given, and each fault that it names.

    tolerances: in words, and whether each holds.
    """
    outcome = report.outcome
    cases = [Case("outcome", "" if outcome.passed else f"{outcome.words}. {verdict}")]
    cases += [Case(name, "" if holds else f"{name} does not hold") for name, holds in tolerances.items()]
    return cases + [Case(f"no fault: {name}", name) for name in outcome.faults]
