"""The look of audit.html, in light and dark, and the policy that keeps model text inert."""

# Nothing is loaded and nothing runs, whatever a model wrote.
_RULES = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
POLICY = f'<meta http-equiv="Content-Security-Policy" content="{_RULES}">'

_COLOURS = """
:root {
  --bg: #fff; --fg: #1a1c1f; --soft: #5c6470; --line: #d8dce2; --panel: #f5f6f8; --link: #0b57b0;
  --good: #0a6b3b; --bad: #b02a1c; --s0: #0b57b0; --s1: #c2570c; --s2: #0a7d52; --heat: 217, 95, 2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #15171a; --fg: #e8eaed; --soft: #a3abb8; --line: #383d45; --panel: #1f2227; --link: #8ab8ff;
    --good: #5fd39a; --bad: #ff8f80; --s0: #8ab8ff; --s1: #ffab66; --s2: #5fd39a; --heat: 255, 140, 60;
  }
}
"""

_LAYOUT = """
* { box-sizing: border-box }
html { scroll-behavior: smooth; scroll-padding-top: 4rem }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto } }
body {
  font: 16px/1.55 system-ui, sans-serif; background: var(--bg); color: var(--fg);
  max-width: 62rem; margin: 0 auto; padding: 1rem 1rem 4rem; overflow-wrap: break-word;
}
h1 { font-size: 1.5rem; margin: .6rem 0 }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .6rem }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem }
a { color: var(--link) }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px }
section:focus { outline: none }
.skip { position: absolute; left: -99rem }
.skip:focus { left: 1rem; top: .5rem; background: var(--bg); padding: .3rem .6rem; z-index: 2 }
.answer { font-size: 2rem; font-weight: 700; margin: .4rem 0 }
.equal { color: var(--good) }
.unequal { color: var(--bad) }
.unproven { color: var(--fg) }
nav {
  position: sticky; top: 0; background: var(--bg); border-bottom: 1px solid var(--line); z-index: 1;
}
nav ul { display: flex; gap: 1.1rem; list-style: none; margin: 0; padding: .5rem 4px; overflow-x: auto }
nav li { white-space: nowrap }
.cause {
  font-size: 1.1rem; background: var(--panel); border-left: 5px solid var(--bad);
  padding: .8rem 1rem; margin: .4rem 0 1rem;
}
header:has(.equal) ~ main .cause { border-color: var(--good) }
header:has(.unproven) ~ main .cause { border-color: var(--soft) }
.wide { overflow-x: auto; margin: .6rem 0 }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
td, th {
  border-bottom: 1px solid var(--line); padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top;
}
th { color: var(--soft); font-weight: 600 }
td { overflow-wrap: anywhere; min-width: 4.5rem }
td:first-child { min-width: 8rem }
td.n { white-space: nowrap; min-width: 0; padding-right: 1.2rem }
td.text { min-width: 13rem; max-width: 24rem }
details { border-top: 1px solid var(--line); padding: .3rem 0 }
details details { border: 0 }
summary { cursor: pointer; padding: .2rem 0 }
@media print { nav, .skip { display: none } }
"""

_TOKENS = """
.texts, .legend .t { font-family: ui-monospace, monospace }
.texts {
  white-space: pre-wrap; overflow-wrap: anywhere; overflow: clip; line-height: 1.9; margin: .4rem 0;
  background: var(--panel); padding: .6rem .8rem; border-radius: 6px;
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
svg { width: 100%; min-width: 34rem; height: auto; background: var(--panel); border-radius: 6px }
svg text { font: 12px system-ui, sans-serif; fill: var(--fg) }
svg .label { fill: var(--soft) }
svg text.flag { font-weight: 600 }
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
