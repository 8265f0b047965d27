"""What a run shows and leaves behind: metrics as data, progress on the terminal, pictures.

charts      line charts as SVG, for pages: text, without a script and without a library
console     a console whose failures end nothing
contents    what a checkpoint holds, as text
metrics     one JSON object per optimizer step, one per line, readable while the run goes on
page_parts  what pages are made of: the frame and its style, tiles, tables
pictures    pictures of a run
printable   what comes from files, hosts and models, on its way to a terminal
progress    live progress: two lines redrawn in place on a terminal, a plain line every few seconds anywhere else
readable    numbers as people read them: bytes, counts, durations, a curve as one line of bars
run_page    the page of a run: what its folder says, as one HTML file that needs nothing else
tables      the tables that a run ends with: what it learned, what it held, what it sent
"""
