"""The style sheet of the page: system fonts, two colour schemes, one column."""

STYLE = """
:root{color-scheme:light dark;--page:#fbfbf9;--card:#fff;--ink:#1d2329;--dim:#5f6b76;
--rule:#e2e4e0;--track:#eff0ed;--other:#8ea3b5;--own:#0f7f78;--limit:#3c4650;--exposed:#d9742b;
--compute:#7f99b2;--skew:#8d6bb3;--bad:#a33428;--badbg:#fbefec;--ownbg:#eef7f5}
@media (prefers-color-scheme:dark){:root{--page:#14181c;--card:#1b2026;--ink:#e6e9ec;--dim:#99a5b0;
--rule:#2d343b;--track:#262c33;--other:#64798c;--own:#3fb5aa;--limit:#b9c3cc;--exposed:#e08a4a;
--compute:#66829d;--skew:#a88bcf;--bad:#f0958a;--badbg:#33211f;--ownbg:#18302f}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","Liberation Sans",sans-serif;
-webkit-text-size-adjust:100%}
main{max-width:1200px;margin:0 auto;padding:44px 24px 12px}
footer{max-width:1200px;margin:0 auto;padding:8px 24px 40px;color:var(--dim);font-size:13px}
.eyebrow{margin:0;color:var(--own);font-size:13px;font-weight:600;letter-spacing:.04em}
h1{margin:4px 0 10px;font-size:32px;line-height:1.2;font-weight:650;letter-spacing:-.015em;
overflow-wrap:anywhere}
h2{margin:0 0 14px;font-size:19px;line-height:1.3;font-weight:650;letter-spacing:-.005em}
h3{margin:22px 0 8px;font-size:14px;font-weight:650;overflow-wrap:anywhere}
.facts{display:flex;flex-wrap:wrap;gap:2px 0;margin:0;padding:0;list-style:none;color:var(--dim);
font-size:15px}
.facts li:not(:last-child):after{content:"\\00b7";margin:0 9px}
section{margin:28px 0 0;padding:24px 26px;background:var(--card);border:1px solid var(--rule);
border-radius:10px}
.answer{border-left:4px solid var(--own);padding:20px 26px}
.answer p{margin:0;max-width:50em;overflow-wrap:anywhere}
.answer p+p{margin-top:12px}
.answer p:first-child{font-size:18px;line-height:1.5}
figure{margin:0}
figcaption{margin-top:8px;color:var(--dim);font-size:13px}
svg{display:block;overflow:visible}
svg text{fill:var(--ink);font-size:14px;font-variant-numeric:tabular-nums}
svg .name{font-weight:600}
svg .own .name{fill:var(--own)}
svg .dim,svg .tick{fill:var(--dim)}
svg .tick,svg .kneename{font-size:12px}
svg .kneename{fill:var(--own);font-weight:650}
.track{fill:var(--track)}
.other .bar,.idle .bar{fill:var(--other)}.idle .bar{opacity:.5}
.own .bar{fill:var(--own)}.limit .bar{fill:var(--limit)}
rect.compute{fill:var(--compute)}rect.exposed{fill:var(--exposed)}rect.skew{fill:var(--skew)}
.whisker{stroke:var(--ink);stroke-width:1.5;opacity:.75}
.mark{stroke:var(--limit);stroke-width:1.5;stroke-dasharray:3 2}
.grid{stroke:var(--rule);stroke-width:1}
polyline{fill:none}
polyline.line{stroke:var(--own);stroke-width:2}
polyline.limit{stroke:var(--limit);stroke-width:1.5;stroke-dasharray:5 4;opacity:.8}
circle.dot{fill:var(--own)}
circle.knee{fill:var(--card);stroke:var(--own);stroke-width:3}
line.knee{stroke:var(--own);stroke-width:1;stroke-dasharray:2 3}
.narrow{display:none}
.legend{display:flex;flex-wrap:wrap;gap:4px 20px;margin:0 0 10px;padding:0;list-style:none;
font-size:14px}
.legend li:before{content:"";display:inline-block;width:12px;height:12px;margin-right:7px;
border-radius:2px;vertical-align:-1px;background:currentColor}
.legend .compute:before{background:var(--compute)}
.legend .exposed:before{background:var(--exposed)}
.legend .skew:before{background:var(--skew)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));
gap:24px 36px}
.plots h3{margin:0 0 4px}
.problems,.notes{margin:14px 0 0;padding:0;list-style:none;font-size:14px}
.problems li{margin-top:6px;padding:7px 11px;border-radius:6px;background:var(--badbg);
color:var(--bad);overflow-wrap:anywhere}
.problems b{margin-right:6px}
.notes{color:var(--dim)}
.notes li{margin-top:3px;overflow-wrap:anywhere}
.scroll{overflow-x:auto;margin:0 -26px}
.scroll+.scroll{margin-top:24px}
table{width:100%;border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
caption{padding:0 26px 6px;text-align:left;font-weight:650}
th,td{padding:7px 9px;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap;
vertical-align:baseline}
th:first-child{position:sticky;left:0;padding-left:26px;background:var(--card);text-align:left}
td:last-child,th:last-child{padding-right:26px}
thead th{color:var(--dim);font-weight:500;font-size:12.5px}
tbody th{font-weight:600}
tbody tr:last-child>*{border-bottom:0}
tr.own th,tr.knee th{color:var(--own)}
tr.limit{color:var(--dim)}
tr.bad td{color:var(--bad);text-align:left;white-space:normal}
td small{display:block;color:var(--dim);font-size:11px;line-height:1.2}
.tag{margin-left:5px;padding:0 6px;border-radius:8px;background:var(--ownbg);color:var(--own);
font-size:11px;font-weight:600}
details{margin-top:18px;font-size:14px}
summary{cursor:pointer;color:var(--dim)}
details p{color:var(--dim);margin:8px 0 0}
dl.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr));
gap:6px 28px;margin:0;font-size:14px}
details dl.grid{margin-top:10px}
dl.grid div{display:flex;gap:12px;min-width:0}
dl.grid .whole{grid-column:1/-1}
dt{flex:0 0 8.5em;color:var(--dim);overflow-wrap:anywhere}
dd{margin:0;min-width:0;overflow-wrap:anywhere}
section>h3:first-of-type{margin-top:0}
pre{margin:0;padding:11px 14px;border-radius:6px;background:var(--track);font-size:13px;
white-space:pre-wrap;overflow-wrap:anywhere}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
@media (max-width:640px){main{padding:26px 14px 8px}h1{font-size:25px}
section{padding:18px 16px}.scroll{margin:0 -16px}
th:first-child,caption{padding-left:16px}td:last-child,th:last-child{padding-right:16px}.answer{padding:16px}
.answer p:first-child{font-size:17px}.wide,.more{display:none}.narrow{display:inline}
footer{padding:8px 14px 32px}svg text{font-size:13px}}
@media print{body{background:#fff}section{break-inside:avoid}}
"""
