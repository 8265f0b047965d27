"""Complete trainings to run, read and copy: `lm` trains a byte-level GPT on any text.

face            the face-recognition recipe: drawn or photographed faces, a ViT, a head larger than it, verification
folder          the run folder
gpt             a byte-level GPT decoder: RMSNorm, rotary positions, SwiGLU, causal attention, no biases and no dropout
largest         the largest micro-batch of a run that fits into a rank's memory, by plan: nothing runs for it
lm              trains a byte-level GPT on text: read it top to bottom to see how an engine is used
settings_text   settings as a config file
train_config    the settings of the language-model recipe: the shape of the model and the run around it
_corpus         the corpus and the windows cut from it
_needed_memory  the least that a run needs of each memory, so that what cannot fit is refused before any of it is taken
_planned_peak   the peak of a step as planned beside the one of a step that ran, for the end of a run
"""
