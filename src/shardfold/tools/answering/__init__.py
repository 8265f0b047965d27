"""A model that answers: what `generate`, `chat` and `serve` share.

open_config   how a model is opened, as settings
opened_model  a model with its tokenizer, split over ranks as it is asked, which answers and is not trained
text_stream   text of an answer as its tokens come
"""
