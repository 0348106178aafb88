"""The look of audit.html, in light and dark, and the policy that keeps model text inert."""

# Nothing is loaded and nothing runs, whatever a model wrote.
_RULES = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
POLICY = f'<meta http-equiv="Content-Security-Policy" content="{_RULES}">'

# The colours and the cards are those of a run's report (engine/runs/report/static/page.css). Each pair of
# text and background has a contrast of at least 4.5, in both themes.
_COLOURS = """
:root {
  --bg: #f6f7f9; --panel: #fff; --line: #dfe3e8; --fg: #1a2029; --soft: #535c69; --link: #1f5fbf;
  --good: #17663a; --good-soft: #e2f4e9; --bad: #a4262c; --bad-soft: #fde9e9;
  --sound: #1f5fbf; --sound-soft: #e8f0fd; --grid: #e9ecf0;
  --shadow: 0 1px 2px rgb(20 30 50 / 6%), 0 4px 14px rgb(20 30 50 / 5%);
  --s0: #0b57b0; --s1: #c2570c; --s2: #0a7d52; --heat: 217, 95, 2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #0f1318; --panel: #171c23; --line: #2b333d; --fg: #e8ecf1; --soft: #a3adba; --link: #7db2ff;
    --good: #7fd6a0; --good-soft: #15301f; --bad: #ff9a94; --bad-soft: #3b1b1c;
    --sound: #7db2ff; --sound-soft: #1b2a40; --grid: #262d36; --shadow: none;
    --s0: #8ab8ff; --s1: #ffab66; --s2: #5fd39a; --heat: 255, 140, 60;
  }
}
"""

_LAYOUT = """
* { box-sizing: border-box }
html { scroll-behavior: smooth; scroll-padding-top: 3.6rem }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto } }
body {
  margin: 0; background: var(--bg); color: var(--fg); overflow-wrap: break-word;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
header, main { max-width: 1280px; margin: 0 auto; padding: .8rem 1rem 0 }
main { padding-bottom: 4rem }
h1, h2, h3, p { margin: 0 }
h1 { font-size: 1.3rem; line-height: 1.25; margin-bottom: .6rem; overflow-wrap: anywhere }
h2 { font-size: 1.05rem; margin-bottom: .4rem }
h3 { font-size: .95rem; margin: 1.4rem 0 .4rem }
p + p { margin-top: .5rem }
a { color: var(--link) }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; border-radius: 4px }
section:focus, .inside:focus { outline: none }
.inside { scroll-margin-top: 6.5rem }
.skip { position: absolute; left: -99rem }
.skip:focus { left: 1rem; top: .5rem; background: var(--panel); padding: .3rem .6rem; z-index: 2 }
.bar {
  position: sticky; top: 0; z-index: 1; background: var(--panel); border-bottom: 1px solid var(--line);
  display: flex; align-items: center; gap: .2rem 1.1rem; padding: .35rem max(1rem, calc(50vw - 624px));
}
.brand { font-weight: 700; white-space: nowrap }
.brand b { color: var(--link) }
nav { min-width: 0 }
nav ul { display: flex; flex-wrap: wrap; gap: 0 .2rem; list-style: none; margin: 0; padding: 3px }
nav li { white-space: nowrap }
nav a { color: var(--soft); text-decoration: none; padding: .2rem .55rem; border-radius: 6px; display: block }
nav a:hover { color: var(--fg); background: var(--bg) }
.card {
  background: var(--panel); border: 1px solid var(--line); border-radius: 12px; box-shadow: var(--shadow);
  padding: .9rem 1.1rem; min-width: 0;
}
main > section { margin-top: 1rem }
main > section:first-child { margin-top: 0 }
.screen { display: grid; gap: 1rem; grid-template-columns: minmax(0, 1fr) }
@media (min-width: 900px) {
  .screen { grid-template-columns: minmax(0, 5fr) minmax(0, 7fr) }
  .screen > .card:first-child { grid-row: span 2 }
}
.keys { display: grid; gap: 1rem; grid-template-columns: repeat(3, minmax(0, 1fr)) }
@media (max-width: 620px) { .keys { gap: .5rem } .key { padding: .5rem .6rem } }
.key .value { font-size: 1.6rem; font-weight: 700; line-height: 1.3; letter-spacing: -.02em; margin: 0 }
.key .name, .key .note { color: var(--soft); font-size: .85rem; margin: 0; line-height: 1.35 }
@media (max-width: 620px) { .key .value { font-size: 1.15rem } }
.answer { font-size: 1.75rem; line-height: 1.25; font-weight: 700 }
.answer + p { margin-top: .2rem }
.verdict.equal { background: var(--good-soft); color: var(--good) }
.verdict.rounding { background: var(--sound-soft); color: var(--sound) }
.verdict.unequal { background: var(--bad-soft); color: var(--bad) }
.verdict { border-color: color-mix(in srgb, currentcolor 40%, var(--line)) }
.verdict.unproven { border-color: var(--line) }
.verdict > p + p { color: var(--fg) }
.cause { font-size: 1.02rem }
.wide { overflow-x: auto; margin: .6rem 0 }
table { border-collapse: collapse; font-size: .9rem }
td, th {
  border-bottom: 1px solid var(--grid); padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top;
}
th { color: var(--soft); font-weight: 600 }
td { overflow-wrap: anywhere; min-width: 4.5rem }
td:first-child { min-width: 8rem }
td.n { white-space: nowrap; min-width: 0; padding-right: 1.2rem }
td.text { min-width: 13rem; max-width: 24rem }
details { padding: .2rem 0 }
.inside > details { border-top: 1px solid var(--line) }
.card > details { margin-top: .4rem; padding: 0 }
section.card { padding: .3rem 1.1rem }
main > section + section { margin-top: .6rem }
section.card > details { margin: 0 }
summary { cursor: pointer; padding: .15rem 0 }
summary h2 { display: inline; margin: 0 }
@media print { .bar, .skip { display: none } }
"""

_TOKENS = """
.texts, .legend .t { font-family: ui-monospace, monospace }
.texts {
  white-space: pre-wrap; overflow-wrap: anywhere; overflow: clip; line-height: 1.9; margin: .4rem 0;
  background: var(--bg); padding: .6rem .8rem; border-radius: 6px;
}
.prompt { color: var(--soft) }
.legend { line-height: 2.2; font-size: .9rem }
.legend .t { padding: .1rem .4rem; white-space: nowrap }
.t { unicode-bidi: isolate; border-bottom: 3px solid transparent; padding: .1rem .04rem; border-radius: 2px }
.d1 { background: rgba(var(--heat), .08) }
.d2 { background: rgba(var(--heat), .16) }
.d3 { background: rgba(var(--heat), .27) }
.d4 { background: rgba(var(--heat), .4); border-bottom-color: rgba(var(--heat), .6) }
.d5 { background: rgba(var(--heat), .5); border-bottom-color: rgb(var(--heat)) }
.d6 { background: rgba(var(--heat), .5); border-bottom-color: var(--bad); font-weight: 700 }
.d7 { background: var(--fg); color: var(--bg) }
.t:target, .t:focus { outline: 3px solid var(--link); outline-offset: 1px }
"""

_PLOTS = """
figure { margin: 1rem 0; overflow-x: auto }
.plot { overflow-x: auto }
svg { width: 100%; min-width: 32rem; height: auto; display: block }
svg text { font: 12px system-ui, sans-serif; fill: var(--fg) }
svg .label { fill: var(--soft) }
svg text.flag { font-weight: 600 }
/* On a phone the whole plot is seen: it shrinks by half, and its words by less. */
@media (max-width: 620px) { svg { min-width: 0 } svg text { font-size: 18px } }
.s0 { fill: var(--s0); stroke: var(--s0) }
.s1 { fill: var(--s1); stroke: var(--s1) }
.s2 { fill: var(--s2); stroke: var(--s2) }
.line { fill: none; stroke-width: 1.5 }
.grid { stroke: var(--line); fill: none }
circle, rect { stroke-width: 0 }
path.flag { stroke: var(--fg); fill: none }
path.f0 { stroke-dasharray: 4 3 }
"""

STYLE = _COLOURS + _LAYOUT + _TOKENS + _PLOTS
