"""The style sheet of the report: one column, light and dark, three colours (a, b, c) for all pictures."""

STYLE = """
:root {
  color-scheme: light dark;
  --ink: light-dark(#1b1f24, #e6e8eb);
  --paper: light-dark(#fff, #15181c);
  --faint: light-dark(#6b7280, #9aa3af);
  --line: light-dark(#dfe3e8, #333a42);
  --band: light-dark(#f5f7f9, #1c2127);
  --a: light-dark(#2563eb, #7aa7ff);
  --b: light-dark(#d9480f, #ff9a62);
  --c: light-dark(#0f7b53, #5ad1a0);
}
body {
  font: 15px/1.5 system-ui, sans-serif;
  color: var(--ink);
  background: var(--paper);
  max-width: 760px;
  margin: 2rem auto;
  padding: 0 1rem;
}
h1 { font-size: 1.5rem }
h2 { font-size: 1.15rem; margin-top: 2.2rem }
h3 { font-size: 1rem; margin-bottom: .3rem }
.faint { color: var(--faint); margin: .4rem 0 }
figure { margin: 1rem 0 }
figcaption { font-weight: 600; display: flex; justify-content: space-between; flex-wrap: wrap }
.legend { font-weight: 400; color: var(--faint) }
.legend span { margin-left: 1rem }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; border-radius: 2px }
i.a, i.teacher { background: var(--a) }
i.b, i.student { background: var(--b) }
i.c, i.picked { background: var(--c) }
svg { display: block; width: 100%; height: auto }
svg text { font-size: 11px; fill: var(--faint) }
.grid, .axis { stroke: var(--line) }
.band0 { fill: var(--band) }
.band1 { fill: transparent }
.curve { fill: none; stroke-width: 1.5; stroke-linejoin: round }
.curve.a { stroke: var(--a) }
.curve.b { stroke: var(--b) }
.curve.c { stroke: var(--c) }
.dot.a, rect.teacher { fill: var(--a) }
.dot.b, rect.student { fill: var(--b) }
.dot.c, rect.picked { fill: var(--c) }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left }
pre {
  font: 12px/1.7 ui-monospace, monospace;
  white-space: pre-wrap;
  overflow-wrap: anywhere;
  border: 1px solid var(--line);
  border-radius: 4px;
  padding: .6rem;
}
pre span { border-radius: 2px }
pre .pick { outline: 1.5px solid var(--c) }
pre .next { background: var(--b); color: var(--paper) }
"""
