"""Bodies of requests for embeddings, labels and scores, in the shapes of OpenAI, vLLM, Jina and Cohere."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from manylora.openai.api.schema import MAX_TOKENS, AdapterFields, Body, Items, RequestId, Text, TokenId

MAX_INPUTS = 2048  # as OpenAI's
Ids = Annotated[Items[TokenId], Field(min_length=1)]
Texts = Annotated[Items[str], Field(min_length=1, max_length=MAX_INPUTS)]


class PooledRequest(AdapterFields):
    """Fields of all pooled requests. truncate_prompt_tokens: use only the last N; -1: as many as fit.
    normalize, activation, softmax: vLLM's older names of use_activation.
    """

    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    add_special_tokens: bool = True
    truncation_side: Literal["left"] = "left"
    use_activation: bool = True
    normalize: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None
    request_id: RequestId | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    priority: int = Field(0, ge=0, le=0)
    user: Text | None = None

    @model_validator(mode="after")
    def _one_name(self) -> PooledRequest:
        names = ("normalize", "activation", "softmax")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if "use_activation" in self.model_fields_set:
            given["use_activation"] = self.use_activation
        if len(set(given.values())) > 1:
            raise ValueError(f"{' and '.join(given)} mean the same: give one of them")
        for value in given.values():
            self.use_activation = value
        return self


class EmbeddingRequest(PooledRequest):
    """input: a text, token ids, or a list of either."""

    input: str | Ids | Texts | Annotated[Items[Ids], Field(min_length=1, max_length=MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] = "float"
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "little"
    dimensions: int | None = Field(None, ge=1, le=MAX_TOKENS)


class PoolingRequest(EmbeddingRequest):
    """task: None: labels or embeddings, depending on the adapter or model."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None


class ClassifyRequest(PooledRequest):
    input: str | Ids | Texts | Annotated[Items[Ids], Field(min_length=1, max_length=MAX_INPUTS)]


class ScoreRequest(PooledRequest):
    """text_1: one text, or one for each text_2."""

    text_1: str | Texts
    text_2: str | Texts


class RerankDocument(Body):
    text: str


class RerankRequest(PooledRequest):
    """top_n: number of documents to return; 0: all."""

    query: str
    documents: Annotated[Items[str | RerankDocument], Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: int = Field(0, ge=0, le=MAX_TOKENS)
    return_documents: bool = True
    max_tokens_per_doc: int | None = Field(None, ge=1, le=MAX_TOKENS)
