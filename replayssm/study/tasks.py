"""Running tasks through lm-eval: its prompts and filters, our generation, storage and comparison.

Owns the order of things: load every task and check every prompt, then create the run's folder,
generate what the sample store lacks, and score. lm-eval supplies tasks, prompts and filters; its
evaluator, cache and statistics are not used (see `samples` and `compare` for what they lack).
"""

import contextlib
import io
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from replayssm.engine.lockstep import Arm, Lockstep
from replayssm.engine.prefills import PrefillCache
from replayssm.models.loading import LoadedModel
from replayssm.models.session import describe_backends
from replayssm.study.answers import KINDS, extract
from replayssm.study.config import nearest
from replayssm.study.lm_eval_model import ReplayLM
from replayssm.study.provenance import environment
from replayssm.study.responses import Prompt, Responder, Settings
from replayssm.study.samples import Sample, SampleStore, question_digest
from replayssm.study.store import digest, file_digest, read_json, write_json
from replayssm.study.task_data import evals_folder
from replayssm.study.task_results import (
    TASK_METRIC_VERSION,
    Question,
    TaskRun,
    check_gold_letters,
    rescore,
)
from replayssm.study.task_spec import DEFAULT_CAP, TaskRequest, TaskSpec


@dataclass(frozen=True, kw_only=True)
class LoadedTask:
    """A task as lm-eval builds it: prompts (text, in memory only) and what is known of each.

    prefill: what the task file says, see `task_spec.TaskRequest`. filters: lm-eval's own score of
    an answer to question i, by the name of its filter.
    """

    name: str
    kind: str
    questions: tuple[Question, ...]
    prompts: tuple[str, ...]
    generation: dict
    prefill: int | None
    filters: Callable[[int, str], dict[str, float]]


def load_task(
    request: TaskRequest,
    *,
    limit: int | None,
    options: Mapping[str, str | None],
    chat: ReplayLM | None = None,
) -> LoadedTask:
    """Load a task of `evals/` with lm-eval.

    options: data_dir, gpqa_archive, gpqa_password. chat: the model whose chat template is applied.
    Raises ValueError for an unknown task and for data that are not there.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # advice on options that are ours here
    given = {key: value for key, value in options.items() if value is not None}
    manager = TaskManager(include_path=str(evals_folder()), include_defaults=False, metadata=given)
    if request.name not in manager.all_subtasks:
        raise ValueError(
            f"unknown task {request.name!r}; {nearest(request.name, manager.all_subtasks)}"
        )
    task = manager.load([request.name])["tasks"][request.name]
    kind = (task.config.metadata or {}).get("answer")
    if task.OUTPUT_TYPE != "generate_until" or kind not in KINDS:
        raise ValueError(
            f"task {request.name!r} needs output_type generate_until and metadata answer, one of "
            f"{', '.join(KINDS)}"
        )
    task.set_fewshot_seed(seed=1234)  # lm-eval's own default
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar knows no switch
        task.build_all_requests(
            limit=limit,
            rank=0,
            world_size=1,
            apply_chat_template=chat is not None,
            fewshot_as_multiturn=chat is not None,
            chat_template=chat.apply_chat_template if chat else None,
            tokenizer_name=chat.tokenizer_name if chat else "",
        )
    instances = task.instances
    targets = [task.doc_to_target(instance.doc) for instance in instances]
    questions = tuple(
        Question(
            question=question_digest(request.name, instance.args[0]),
            document=instance.doc_id,
            gold=_gold(request.name, kind, target),
            group=instance.doc.get("group"),
        )
        for instance, target in zip(instances, targets, strict=True)
    )
    if kind == "letter":
        check_gold_letters(request.name, questions)
    if len({question.question for question in questions}) < len(questions):
        raise ValueError(f"{request.name}: two questions have the same prompt")

    def filters(index: int, answer: str) -> dict[str, float]:
        instance = instances[index]
        # It would compile the template of the right answer again for every answer and filter.
        task.doc_to_target = lambda *_: targets[index]
        scores = {}
        for ensemble in task._filters:
            instance.resps, instance.filtered_resps = [answer], {}
            ensemble.apply([instance])
            read = instance.filtered_resps[ensemble.name]
            metrics = task.process_results(instance.doc, [read])
            scores[ensemble.name] = float(next(iter(metrics.values())))
        return scores

    return LoadedTask(
        name=request.name,
        kind=kind,
        questions=questions,
        prompts=tuple(instance.args[0] for instance in instances),
        generation=dict(instances[0].args[1]),
        prefill=(task.config.metadata or {}).get("prefill"),
        filters=filters,
    )


def _gold(task: str, kind: str, target: str) -> str:
    gold = extract("number", target).answer if kind == "number" else target.strip()
    if not gold:
        raise ValueError(f"{task}: a question has no right answer of kind {kind}")
    return gold


# -- a run -----------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class TaskRunResult:
    """One run: its folder, its summary, and what was generated for it now, in which time."""

    run: TaskRun
    summary: dict
    generated: int
    tokens: int
    seconds: float


def run_tasks(
    spec: TaskSpec,
    *,
    out: Path,
    open_model: Callable[[str], LoadedModel],
    options: Mapping[str, str | None],
    backend: str = "auto",
    progress: bool = True,
) -> Iterator[TaskRunResult]:
    """Evaluate `spec` on each of its models, one after the other, as the iterator is advanced.

    Samples that are stored already are not generated again. Raises ValueError for anything that
    cannot be run as asked, before anything is generated or written.
    """
    for model in spec.models:
        yield _Evaluation(spec, model, open_model(model), out, options, backend).run(progress)


class _Evaluation:
    """One model's run: everything checked on construction, nothing written before `run`."""

    def __init__(self, spec: TaskSpec, model: str, loaded: LoadedModel, out, options, backend):
        self.spec, self.model, self.loaded, self.backend = spec, model, loaded, backend
        self.out = Path(out)
        self.responders = [
            Responder(
                loaded,
                arm.policy,
                lanes=spec.batch_size,
                seed=spec.seed,
                backend=backend,
                think_end_token=spec.think_end_token,
            )
            for arm in spec.arms()
        ]
        chat = None
        if spec.chat_template:
            chat = ReplayLM(
                loaded,
                think_end_token=spec.think_end_token,
                enable_thinking=spec.enable_thinking,
            )
        self.tasks: list[LoadedTask] = []
        self.prompts: list[list[Prompt]] = []  # of each task, one a question
        self.settings: list[Settings] = []
        for request in spec.tasks:
            task = load_task(request, limit=spec.limit_of(request), options=options, chat=chat)
            wanted = dict(task.generation)
            if spec.cap_of(request) is not None:
                wanted["max_gen_toks"] = spec.cap_of(request)
            if spec.temperature > 0.0:
                wanted |= {"do_sample": True, "temperature": spec.temperature}
            prefill = task.prefill if request.prefill is None else request.prefill
            settings = replace(Settings.from_kwargs(wanted, cap=DEFAULT_CAP), prefill=prefill)
            asked = [
                Prompt(text=text, question=question.question)
                for text, question in zip(task.prompts, task.questions, strict=True)
            ]
            encoded = self.responders[0].check(asked, settings)  # takes a while: once for all arms
            self.prompts.append(
                [replace(p, tokens=tokens) for p, tokens in zip(asked, encoded, strict=True)]
            )
            self.tasks.append(task)
            self.settings.append(settings)
        self.inputs = {
            "weights": loaded.weights_digest,
            "config": file_digest(loaded.folder / "config.json"),
            "tokenizer": loaded.tokenizer_digest,
        }
        self.document = self._document()
        self.run_folder = TaskRun(
            self.out / "tasks" / spec.name / digest(self.document["identity"])[:12]
        )

    def _store(self, arm: int, task: int) -> SampleStore:
        """Keyed by all an answer depends on: model, policy, ring, seed, and how it is asked."""
        policy = self.spec.arms()[arm].policy
        identity = {
            "task": self.tasks[task].name,
            "model": self.inputs,
            "dtype": self.spec.dtype,
            "policy": policy.to_dict(),
            "seed": self.spec.seed,
            "think_end_token": self.spec.think_end_token,
            "generation": asdict(self.settings[task]),
        }
        name = f"{self.tasks[task].name}-{self.model.rstrip('/').split('/')[-1]}-{policy.label}"
        return SampleStore(self.out / "samples", identity, name=name)

    def _document(self) -> dict:
        identity = self.spec.identity(self.model) | {"inputs": self.inputs}
        identity["tasks"] = [
            {
                "name": task.name,
                "kind": task.kind,
                "samples": self.spec.samples_of(request),
                "questions": digest([asdict(question) for question in task.questions]),
                **asdict(settings),
            }
            for request, task, settings in zip(
                self.spec.tasks, self.tasks, self.settings, strict=True
            )
        ]
        for index, arm in enumerate(identity["arms"]):
            arm["samples"] = {
                task.name: self._store(index, number).path.name
                for number, task in enumerate(self.tasks)
            }
        return {
            "task_metric_version": TASK_METRIC_VERSION,
            "identity": identity,
            "display": self.spec.display(),
        }

    def run(self, progress: bool) -> TaskRunResult:
        folder = self.run_folder.folder
        with folder.lock():
            asked = {task.name: task.questions for task in self.tasks}
            self.run_folder.begin(self.document, asked)
            folder.set_status("started")
            try:
                generated, tokens, seconds = self._generate(progress)
                if not folder.provenance_path.exists():
                    self._write_provenance()  # every answer was stored already
                summary = rescore(self.run_folder)
                folder.set_status("complete")
            except Exception as error:
                folder.fail(error, traceback.format_exc())
                raise
        return TaskRunResult(
            run=self.run_folder,
            summary=summary,
            generated=generated,
            tokens=tokens,
            seconds=seconds,
        )

    def _generate(self, progress: bool) -> tuple[int, int, float]:
        """Generate what is missing; (answers, their tokens, seconds)."""
        counts = [
            len(task.questions) * self.spec.samples_of(request)
            for request, task in zip(self.spec.tasks, self.tasks, strict=True)
        ]
        started, generated, tokens = time.monotonic(), 0, 0
        with tqdm(
            total=sum(counts) * len(self.responders),
            unit="answer",
            disable=None if progress else True,
        ) as bar:
            for number, request in enumerate(self.spec.tasks):
                prompts = [
                    replace(prompt, sample=sample)
                    for sample in range(self.spec.samples_of(request))
                    for prompt in self.prompts[number]
                ]
                prefills = PrefillCache(self.loaded.adapter)
                for arm, described in enumerate(self.spec.arms()):
                    bar.set_description(f"{request.name}, {described.label}")
                    with self._store(arm, number) as store:
                        missing = [p for p in prompts if (p.question, p.sample) not in store]
                        if missing and not generated:
                            self._write_provenance()
                        bar.update(len(prompts) - len(missing))
                        for sample in self._answers(arm, number, missing, prefills):
                            store.add(sample)
                            generated, tokens = generated + 1, tokens + sample.new_tokens
                            bar.update()
                            rate = tokens / max(1e-9, time.monotonic() - started)
                            bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
                        store.finish()
        return generated, tokens, time.monotonic() - started

    def _answers(
        self, arm: int, number: int, missing: list[Prompt], prefills: PrefillCache
    ) -> Iterator[Sample]:
        task = self.tasks[number]
        where = {question.question: i for i, question in enumerate(task.questions)}
        for _, sample in self.responders[arm].respond(missing, self.settings[number], prefills):
            scores = task.filters(where[sample.question], sample.answer)
            yield Sample(**vars(sample) | {"filters": scores})

    def _write_provenance(self) -> None:
        """Note what is in effect; a run continued in another environment lists both."""
        path = self.run_folder.folder.provenance_path
        arms = self.spec.arms()
        policies = {arm.label: arm.policy for arm in arms}
        told = describe_backends(self.loaded.adapter, policies, backend=self.backend)
        here = environment(self.loaded.device, backend=told)
        if path.exists():
            provenance = read_json(path)
            if here not in provenance["environments"]:
                provenance["environments"].append(here)
                write_json(path, provenance)
            return
        probe = Lockstep(
            self.loaded.adapter,
            [
                Arm(label=arm.label, kind=arm.kind, policy=arm.policy, seed=self.spec.seed)
                for arm in arms
            ],
            window=1,
            backend=self.backend,
        )
        token = torch.zeros(1, 1, dtype=torch.int64)
        probe.start(token, tokens=1)
        list(probe.read(token))
        write_json(
            path,
            {
                "environments": [here],
                "requested": {arm.label: arm.policy.describe() for arm in arms},
                "effective": probe.effective(),
                "batch_size": self.spec.batch_size,
                "caps": {
                    task.name: settings.max_new_tokens
                    for task, settings in zip(self.tasks, self.settings, strict=True)
                },
                "inputs": self.inputs,
            },
        )
