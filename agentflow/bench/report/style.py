"""Colours, marks and the page's CSS."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["CSS", "OWNER_COLOURS", "emphasised", "mark_of", "ordered"]

#: Policies that are drawn in colour, in this order of preference, each always with the same class and mark.
_COLOURED = (
    "lru", "lifecycle", "pbkv", "ttl", "belady", "kvflow", "lifecycle+ttl", "continuum", "pbkv-aggressive", "lfu",
    "pbkv-he", "infercept", "autellix", "continuum-preview", "kvflow-oracle",
)  # fmt: skip
_MARKS = ("circle", "square", "diamond", "triangle", "cross")
OWNER_COLOURS = 8


def emphasised(policies: Iterable[str], winner: str | None, limit: int = 6) -> list[str]:
    """Which of ``policies`` are drawn in colour: the winner, and those that people look for."""
    present = list(dict.fromkeys(policies))
    wanted = [*(("lru", winner) if winner else ("lru",)), *_COLOURED]
    out = [p for p in dict.fromkeys(wanted) if p in present][:limit]
    return out + [p for p in present if p not in out][: max(0, limit - len(out))]


def ordered(policies: Iterable[str]) -> list[str]:
    """Policies in the order of their colours."""
    known = {p: i for i, p in enumerate(_COLOURED)}
    return sorted(dict.fromkeys(policies), key=lambda p: known.get(p, len(known)))


def mark_of(place: int) -> str:
    """The mark of the series at a place."""
    return _MARKS[place % len(_MARKS)]


CSS = """
:root{color-scheme:light dark;--bg:#fcfcfb;--card:#fff;--ink:#1b1f24;--soft:#59636e;--line:#d5dae0;--grid:#e7eaee;
--good:#116329;--bad:#a40e26;--accent:#0b57a4;
--c0:#6b7280;--c1:#0b62b8;--c2:#c2410c;--c3:#0f7b5f;--c4:#9b2c86;--c5:#8a6100;--rest:#c3c9d1;
--o0:#0b62b8;--o1:#d97a1a;--o2:#2a9d78;--o3:#b2478f;--o4:#8a6d00;--o5:#5b8fd9;--o6:#c0504d;--o7:#9aa3ad;--free:#eef1f4}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1c2026;--ink:#e7eaee;--soft:#a4adb8;--line:#3a414b;
--grid:#2b313a;--good:#57c478;--bad:#ff8182;--accent:#79b8ff;
--c0:#a4adb8;--c1:#6cb1ff;--c2:#ff9a5c;--c3:#4fd1a5;--c4:#e58ad0;--c5:#e3b341;--rest:#48505b;
--o0:#4d94e8;--o1:#e8933d;--o2:#3fb890;--o3:#cf6bae;--o4:#b99a2b;--o5:#86aee8;--o6:#d97a77;--o7:#69727d;--free:#262b33}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main,header{max-width:74rem;margin:0 auto;padding:0 1rem}
header{padding-top:1.5rem}
h1{font-size:1.35rem;margin:0 0 .3rem}
h2{font-size:1.3rem;margin:2.2rem 0 .6rem;line-height:1.25}
h3{font-size:1.02rem;margin:1.6rem 0 .4rem}
p{margin:.4rem 0;max-width:60rem}
.soft{color:var(--soft);font-size:.88rem}
.won{background:var(--card);border:1px solid var(--line);border-left:.35rem solid var(--accent);border-radius:.4rem;
padding:.9rem 1.1rem;margin:.8rem 0}
.won .big{font-size:1.45rem;line-height:1.3;font-weight:650;margin:0;max-width:none}
.won p{max-width:none}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,20.5rem),1fr));gap:1rem;margin:.6rem 0}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:.4rem;padding:.5rem .6rem;min-width:0}
figcaption{font-size:.88rem;font-weight:600;margin:0 0 .2rem}
svg{display:block;width:100%;height:auto}
svg text{font-size:12px;fill:var(--ink);font-family:inherit}
svg text.tick,svg text.axis{fill:var(--soft)}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:.4rem;background:var(--card);max-width:100%}
.scroll:focus-visible,a:focus-visible{outline:3px solid var(--accent);outline-offset:2px}
.wide svg{min-width:46rem}
table{border-collapse:collapse;font-size:.85rem;width:100%;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.5rem .6rem .3rem}
th,td{padding:.28rem .6rem;border-top:1px solid var(--grid);text-align:right;white-space:nowrap}
th:first-child,td:first-child,th.t,td.t{text-align:left}
td.t.wrap{white-space:normal;min-width:11rem}
thead th{color:var(--soft);font-weight:600;border-top:0}
tr.best th,tr.best td{font-weight:700}
.met{color:var(--good);font-weight:650}.missed{color:var(--bad);font-weight:650}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem;margin:.3rem 0;padding:0;list-style:none}
.legend svg{width:26px;height:12px;display:inline-block;vertical-align:-1px;margin-right:.3rem}
nav ul{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;list-style:none;margin:.4rem 0;padding:0}
a{color:var(--accent)}
.grid{stroke:var(--grid);stroke-width:1}.base{stroke:var(--line);stroke-width:1}
.s{fill:none;stroke-width:2.2}.dash{stroke-dasharray:6 4}.rest{stroke:var(--rest);stroke-width:1.2;fill:none}
.err{stroke-width:1.2;opacity:.75}
.k0{stroke:var(--c0)}.k1{stroke:var(--c1)}.k2{stroke:var(--c2)}.k3{stroke:var(--c3)}.k4{stroke:var(--c4)}.k5{stroke:var(--c5)}
.f0{fill:var(--c0)}.f1{fill:var(--c1)}.f2{fill:var(--c2)}.f3{fill:var(--c3)}.f4{fill:var(--c4)}.f5{fill:var(--c5)}
.frest{fill:var(--rest)}
.o0{fill:var(--o0)}.o1{fill:var(--o1)}.o2{fill:var(--o2)}.o3{fill:var(--o3)}.o4{fill:var(--o4)}.o5{fill:var(--o5)}
.o6{fill:var(--o6)}.o7{fill:var(--o7)}.free{fill:var(--free)}
.lane{fill:var(--free)}.hit{fill:var(--c3)}.compute{fill:var(--c2)}.wait{fill:var(--rest)}
.answer{fill:var(--c1);opacity:.75}
.evict{stroke:var(--bad);fill:var(--bad)}.pin{stroke:var(--c4);fill:var(--c4)}.prefetch{stroke:var(--c5);fill:var(--c5)}
@media (max-width:30rem){body{font-size:15px}.won .big{font-size:1.2rem}h2{font-size:1.15rem}
main,header{padding:0 .7rem}
header{padding-top:1rem}}
@media screen and (max-width:44rem){table.stack thead{position:absolute;clip-path:inset(50%);width:1px;height:1px}
table.stack tr{display:block;padding:.4rem 0;border-top:1px solid var(--grid)}
table.stack th,table.stack td{display:block;text-align:left;border:0;padding:.1rem .6rem;white-space:normal}
table.stack td::before{content:attr(data-name) ": ";color:var(--soft)}}
@media print{:root{color-scheme:light;--bg:#fff;--card:#fff;--ink:#000;--soft:#444;--line:#bbb;--grid:#ddd;
--good:#116329;--bad:#a40e26;--accent:#0b57a4;--c0:#6b7280;--c1:#0b62b8;--c2:#c2410c;--c3:#0f7b5f;--c4:#9b2c86;
--c5:#8a6100;--rest:#c3c9d1;--free:#eef1f4}
body{font-size:10pt}nav{display:none}.scroll{overflow:visible;border:0}.wide svg{min-width:0}
figure,.won,tr{break-inside:avoid}
h2,h3,caption{break-after:avoid}.panels{grid-template-columns:1fr 1fr}table{font-size:7.5pt}th,td{padding:.15rem .3rem}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""
