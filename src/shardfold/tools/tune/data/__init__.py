"""Rows for tuning: formats, templates, prepared files, packing and batches.

batches           windows of batches, each one step
encoding          rows as numbers of tokens
packed_attention  attention of packed samples, one by one, in models of transformers
packing           which samples fit together
prepared          data in mapped files, tokenized once
row_formats       what a row says, told by its columns
rows              what a row becomes
show_data         rows as tokens, those that are trained in colour
sources           files of rows, and blocks of them
templates         conversations as text, and which of it the assistant says
_sampling         in which order samples are read, and which share a row of tokens
_template_words   whether a template writes words as they are
"""
