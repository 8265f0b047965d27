"""The command `shardfold plan`: models by name, what fits where, as text.

command       what `shardfold plan` does with its options
known_models  the models that `shardfold plan` knows, each built without memory, and a micro-batch of them
show          a plan as text: what each layout needs, what the peak is made of, and what would lower it
_plan_page    a plan as one HTML file
"""
