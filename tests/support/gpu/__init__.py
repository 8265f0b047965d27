"""`make gpu` and `make gpu-bench`: what only a device can show, and how fast it is; one report of what was found.

report      the values: cases, sections, the day; Markdown and JSON                  (pure functions)
day         sections in processes of their own, one after the other, in their time
section     a section's process: what it was asked, and the notes it leaves
setting     which device, how many ranks, over which backend
ranks       a function on ranks of such a setting
watched     what is asked of a device here alone: its waits, delays, reserved bytes
machine     the machine                                                               a section
waits       how often a step stops the host                                           a section
memory      bytes that are predicted beside those that are allocated                  a section
races       trainings whose streams are delayed, beside the same on one stream        a section
scenes      what the races train
marked      the tests that are marked `gpu`                                           a section
compared    `shardfold bench`                                                         a section
rates       copies, products and formats, of `make gpu-bench`                         a section
steps       contenders of `shardfold bench`, as `make gpu-bench` has them             sections
timeline    where a step goes                                                         a section

    python -m tests.support.gpu --device sim --ranks 2

A section that dies or hangs is a failed section, and the others run.
"""
