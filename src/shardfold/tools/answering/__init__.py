"""A model that answers: what `generate`, `chat` and `serve` share.

answer_config    the settings of `shardfold generate` and `shardfold chat`
batch_answers    answers to all prompts of a file, as they end
byte_tokenizer   of a GPT whose tokens are bytes
commands         the commands `shardfold generate` and `shardfold chat`
open_config      how a model is opened, as settings
opened_model     a model with its tokenizer, split over ranks as it is asked, which answers and is not trained
text_stream      text of an answer as its tokens come
_chat_session    a conversation on the terminal
_named_adapters  several adapters of peft over one base, of which the model has one at a time
"""
