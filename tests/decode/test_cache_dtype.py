"""A KV cache in 8 bits: the text does not depend on the tree, the batch, the chunks or the session."""

import pytest
import torch
from models import heads_for, padded, prompts, tiny
from oracles import assert_some_accepted, new_tokens

from medusa_decoding import MedusaModel, Session, Tree
from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.decode.runtime.memory import Sizes, memory_use

NEW = 24
TREE = Tree.cartesian([4, 3, 2])


def alone(medusa, row, tree=None):
    return new_tokens(medusa.generate(row[None], max_new_tokens=NEW, tree=tree), len(row))[0]


@pytest.fixture
def by_modules(monkeypatch):
    """Layers run module by module, as with hooks."""
    monkeypatch.setattr(Backbone, "choose_layers", lambda *_, **__: False)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("way", ["native", "by_modules"])
def test_a_tree_writes_the_text_of_plain_decoding(family, way, request):
    """Also for rows of a batch, whose accepted keys are moved with their scales; with a wide cache the text differs."""
    if way == "by_modules":
        request.getfixturevalue(way)
    model = tiny(family)
    rows = prompts(4, [37, 1, 19, 12])
    ids, mask = padded(rows)
    with MedusaModel(model, heads_for(model), TREE, cache_dtype="int8") as medusa:
        expected = [alone(medusa, row, Tree([])) for row in rows]
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
        assert new_tokens(output, ids.shape[1]) == expected
        assert_some_accepted(output)
        session = Session()
        text = torch.cat([rows[0], torch.tensor(expected[0])])
        for prompt in (rows[0], text):
            new = medusa.generate(prompt[None], max_new_tokens=NEW, session=session)
        assert session.reused == len(text) - 1
        assert new_tokens(new, len(text))[0] == alone(medusa, text, Tree([]))


def test_memory_is_counted_and_a_cache_of_another_dtype_is_not_reused():
    model = tiny()
    [row] = prompts(1, [30])
    with MedusaModel(model, heads_for(model), TREE) as medusa:
        session = Session()
        wide = medusa.generate(row[None], max_new_tokens=NEW, session=session)
        medusa.cache_dtype = "int8"
        longer = wide.sequences[0]
        output = medusa.generate(longer[None], max_new_tokens=NEW, session=session)
        assert session.reused == 0
        assert new_tokens(output, len(longer))[0] == alone(medusa, longer)
        cache = session._state.cache
        assert cache.kv.dtype == torch.int8
        use = memory_use(medusa.backbone, Sizes([30], NEW), cache.capacity)
        assert (use.cache, use.tables) == (cache.kv.nbytes, cache.cos.nbytes + cache.sin.nbytes)
        with pytest.raises(ValueError, match="cache_dtype: expected None or 'int8', got 'int4'"):
            medusa.cache_dtype = "int4"
