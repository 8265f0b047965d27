"""Text from a model where its weights live: unequal prompts together, without padding, under any layout.

    for answer in sf.generate(engine, prompts, max_tokens=64, seed=0):
        print(answer.request, answer.tokens)

A forward has one token of each text under way and parts of texts that begin (``batch_scheduler``). Keys and values
rest in pages (``page_books`` has who holds which, ``page_pool`` the tensors), which the model's own attention reads
(``_decoders``, ``paged_attention``).

    batch_scheduler  which tokens of which texts the next forward has
    page_books       which pages are whose
    page_pool        keys and values of all layers
    paged_attention  attention of one forward over pages
    sampling         how the next token is chosen
    texts            a text that is being generated, and the answer that it becomes
    _decoders        how a model is asked, and how its attention comes to read pages
    _products        how some rows are multiplied with a matrix
    _running         the loop, and what users call
"""

from shardfold.generation._running import Generation, generate
from shardfold.generation.sampling import SamplingRule
from shardfold.generation.texts import Continuation, Generated

__all__ = ["Continuation", "Generated", "Generation", "SamplingRule", "generate"]
