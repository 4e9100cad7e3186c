"""Every keyword of the libraries' own estimators means here what it means there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost
from sklearn.metrics import mean_absolute_error
from tests.sweeps import only_in_sweep

from polytrain import ScalingConfig
from polytrain_lightgbm.estimators import (
    PolytrainLGBMClassifier,
    PolytrainLGBMRanker,
    PolytrainLGBMRegressor,
)
from polytrain_plugins import InvalidJobError
from polytrain_xgboost.estimators import (
    PolytrainXGBClassifier,
    PolytrainXGBRanker,
    PolytrainXGBRegressor,
)

HERE = ScalingConfig(num_workers=0)
ROWS = 300
DRAWS = np.random.default_rng(0)
X = DRAWS.normal(size=(ROWS, 4))
X[:, 3] = DRAWS.integers(0, 6, ROWS)
Y = X[:, 0] + X[:, 1] ** 2 + np.array([0, 3, 1, 5, 2, 4])[X[:, 3].astype(int)]
HOLES = np.where(DRAWS.random(X.shape) < 0.2, -999, X)
CLASSES = np.array(["rare", "usual"])[(Y > 3).astype(int)]
WEIGHTS = DRAWS.integers(1, 9, ROWS).astype(float)
SCORES = 5 * X[:, 0]
OTHERS, THEIR_Y = X[:90] + 0.1, Y[:90]
GROUPS = [10] * (ROWS // 10)
QUERIES = np.repeat(np.arange(ROWS // 10), 10)
RELEVANCE = np.digitize(Y, [2, 4])
FEW = {"n_estimators": 8, "max_depth": 3}
EVAL = {"eval_set": [(OTHERS, THEIR_Y)]}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A keyword, and what it is beside."""

    name: str
    value: Any
    of: str = "fit"
    """The method that takes it."""

    init: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of `fit`."""

    rows: Any = None
    label: Any = None
    kind: str = "numbers"
    is_plain_the_same: bool = False
    """Whether nothing of the outcome depends on the keyword."""

    can_be_left_out: bool = True


def outcome(estimator: Any, case: Case, *, with_it: bool) -> list[Any]:
    """What an estimator predicts, what it was evaluated to, and what its features count for."""
    given = {case.of: {case.name: case.value}} if with_it else {}
    rows = X if case.rows is None else case.rows
    label = Y if case.label is None else case.label
    # LightGBM's deeper leaves depend on its number of machines.
    library = {"max_depth": 1} if "lightgbm" in estimator.__module__ else {}
    ours = {"scaling_config": HERE} if "polytrain" in estimator.__module__ else {}
    model = estimator(**{**FEW, **library, **ours, **case.init, **given.get("init", {})})
    silence = {"verbose": False} if "xgboost.sklearn" in estimator.__module__ else {}
    model.fit(rows, label, **{**silence, **case.beside, **given.get("fit", {})})
    found = [model.feature_importances_, model.predict(rows, **given.get("predict", {}))]
    if hasattr(model, "predict_proba"):
        found.append(model.predict_proba(rows, **given.get("predict_proba", {})))
    if "apply" in given:
        found.append(model.apply(rows, **given["apply"]))
    if {"eval_set", "eval_X"} & {*case.beside, case.name}:
        results = model.evals_result() if hasattr(model, "evals_result") else model.evals_result_
        found += [values for metrics in results.values() for _, values in sorted(metrics.items())]
        found.append([metric for metrics in results.values() for metric in sorted(metrics)])
    return found


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        np.shape(a) == np.shape(b)
        and (
            list(a) == list(b)
            if np.asarray(a).dtype.kind in "UO"
            else np.allclose(a, b, rtol=1e-3, atol=1e-4)
        )
        for a, b in zip(one, other, strict=True)
    )


def check(ours: Any, theirs: Any, case: Case) -> None:
    found = outcome(ours, case, with_it=True)
    assert same(found, outcome(theirs, case, with_it=True))
    if case.can_be_left_out:
        assert same(found, outcome(ours, case, with_it=False)) == case.is_plain_the_same


def a_booster(library: Any) -> Any:
    """A model to continue."""
    cls = {xgboost: xgboost.XGBRegressor, lightgbm: lightgbm.LGBMRegressor}[library]
    return cls(n_estimators=3, verbosity=-1 if library is lightgbm else 0).fit(X, Y)


KINDS = {
    "xgb numbers": (PolytrainXGBRegressor, xgboost.XGBRegressor),
    "xgb classes": (PolytrainXGBClassifier, xgboost.XGBClassifier),
    "xgb ranks": (PolytrainXGBRanker, xgboost.XGBRanker),
    "lgbm numbers": (PolytrainLGBMRegressor, lightgbm.LGBMRegressor),
    "lgbm classes": (PolytrainLGBMClassifier, lightgbm.LGBMClassifier),
    "lgbm ranks": (PolytrainLGBMRanker, lightgbm.LGBMRanker),
}
FRAME = pd.DataFrame(X, columns=["a", "b", "c", "d"])

XGB = [
    Case(name="missing", value=-999, of="init", rows=HOLES),
    Case(name="importance_type", value="weight", of="init"),
    Case(
        name="feature_types",
        value=["q", "float", "float", "c"],
        of="init",
        init={"enable_categorical": True},
        rows=FRAME.astype({"d": "float"}),
    ),
    Case(
        name="callbacks",
        value=[xgboost.callback.LearningRateScheduler([0.5, 0.1] * 4)],
        of="init",
    ),
    Case(name="eval_metric", value="mae", of="init", beside=EVAL),
    Case(name="eval_metric", value=["mae", mean_absolute_error], of="init", beside=EVAL),
    Case(
        name="eval_metric",
        value=mean_absolute_error,
        of="init",
        beside={**EVAL, "sample_weight": WEIGHTS, "sample_weight_eval_set": [WEIGHTS[:90]]},
    ),
    Case(name="random_state", value=np.random.RandomState(3), of="init", is_plain_the_same=True),
    Case(name="n_jobs", value=-1, of="init", is_plain_the_same=True),
    Case(name="learning_rate", value=None, of="init", is_plain_the_same=True),
    Case(name="sample_weight", value=WEIGHTS),
    Case(name="base_margin", value=SCORES),
    Case(name="base_margin", value=SCORES, of="predict"),
    Case(name="sample_weight_eval_set", value=[WEIGHTS[:90]], beside=EVAL),
    Case(
        name="base_margin_eval_set",
        value=[SCORES[:90]],
        beside={**EVAL, "base_margin": SCORES},
        can_be_left_out=False,
    ),
    Case(name="xgb_model", value=a_booster(xgboost)),
    Case(name="xgb_model", value=a_booster(xgboost).get_booster()),
    Case(name="output_margin", value=True, of="predict", kind="classes"),
    Case(name="iteration_range", value=(0, 3), of="predict"),
    Case(name="iteration_range", value=(2, 5), of="predict_proba", kind="classes"),
    Case(name="iteration_range", value=(0, 3), of="apply"),
    Case(name="base_margin", value=SCORES, of="predict_proba", kind="classes"),
]
LGBM = [
    Case(name="class_weight", value="balanced", of="init", kind="classes"),
    Case(name="class_weight", value={0: 9.0, 1: 1.0}, of="init", kind="classes"),
    Case(name="importance_type", value="gain", of="init"),
    Case(name="random_state", value=np.random.RandomState(3), of="init", is_plain_the_same=True),
    Case(name="n_jobs", value=-1, of="init", is_plain_the_same=True),
    Case(name="application", value="huber", of="init"),
    Case(name="sample_weight", value=WEIGHTS),
    Case(name="init_score", value=SCORES),
    Case(name="eval_names", value=["left out"], beside=EVAL, is_plain_the_same=True),
    Case(name="eval_sample_weight", value=[WEIGHTS[:90]], beside=EVAL),
    Case(name="eval_class_weight", value=["balanced"], beside=EVAL, kind="classes"),
    Case(
        name="eval_init_score",
        value=[SCORES[:90]],
        beside={**EVAL, "init_score": SCORES},
        can_be_left_out=False,
    ),
    Case(name="eval_metric", value="mae", beside=EVAL),
    Case(name="eval_metric", value="error", beside=EVAL, kind="classes"),
    Case(
        name="eval_metric",
        value=["mae", lambda y, p, w: ("weighed", float(np.mean(w * abs(y - p))), False)],
        beside={**EVAL, "sample_weight": WEIGHTS, "eval_sample_weight": [WEIGHTS[:90]]},
    ),
    Case(name="feature_name", value=["a", "b", "c", "d"], is_plain_the_same=True),
    Case(name="categorical_feature", value=[3]),
    Case(name="categorical_feature", value=["d"], rows=FRAME),
    Case(
        name="callbacks",
        value=[lightgbm.reset_parameter(learning_rate=[0.5, 0.1] * 4)],
    ),
    Case(name="init_model", value=a_booster(lightgbm)),
    Case(name="init_model", value=a_booster(lightgbm).booster_),
    Case(name="raw_score", value=True, of="predict", kind="classes"),
    Case(name="raw_score", value=True, of="predict_proba", kind="classes"),
    Case(name="start_iteration", value=2, of="predict"),
    Case(name="num_iteration", value=3, of="predict"),
    Case(name="num_iteration", value=3, of="predict_proba", kind="classes"),
    Case(name="pred_leaf", value=True, of="predict"),
    Case(name="pred_contrib", value=True, of="predict"),
    Case(name="pred_early_stop", value=True, of="predict", is_plain_the_same=True),
]


def named(case: Case) -> str:
    return f"{case.of}-{case.name}-{case.kind}"


def of_kind(case: Case) -> Case:
    """The case with the labels of its kind."""
    if case.kind == "numbers":
        return case
    label = (Y > 4).astype(int)
    beside = {**case.beside}
    if "eval_set" in beside:
        beside["eval_set"] = [(OTHERS, label[:90])]
    return Case(**{**case.__dict__, "label": label, "beside": beside})


EVERY_TIME = {
    *("missing", "importance_type", "feature_types", "class_weight", "callbacks", "init_model"),
    *("xgb_model", "sample_weight_eval_set", "output_margin", "feature_name", "num_iteration"),
}


def selected(cases: list[Case]) -> list[Any]:
    """Each case as a parameter set; those of one kind of mechanism only once, but in a sweep."""
    seen: set[str] = set()
    found = []
    for case in cases:
        mark = pytest.param if case.name in EVERY_TIME - seen else only_in_sweep
        found.append(mark(case, id=named(case)))
        seen.add(case.name)
    return found


@pytest.mark.parametrize("case", selected(XGB))
def test_a_keyword_of_xgboosts_estimators_has_its_meaning(case: Case) -> None:
    check(*KINDS[f"xgb {case.kind}"], of_kind(case))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", selected(LGBM))
def test_a_keyword_of_lightgbms_estimators_has_its_meaning(case: Case) -> None:
    check(*KINDS[f"lgbm {case.kind}"], of_kind(case))


def test_xgboosts_ranker_takes_queries_in_every_form() -> None:
    weights = np.arange(1.0, len(GROUPS) + 1)
    # XGBoost weighs values when it chooses bins, and here queries have no part in that.
    frame = FRAME.round()
    plain = frame.to_numpy()
    theirs = xgboost.XGBRanker(**FEW, eval_metric="ndcg@4")
    evaluation = [(plain[:90], RELEVANCE[:90])]
    theirs.fit(
        *(plain, RELEVANCE),
        group=GROUPS,
        sample_weight=weights,
        eval_set=evaluation,
        eval_group=[GROUPS[:9]],
        verbose=False,
    )
    frame = frame.assign(qid=QUERIES)
    forms: list[tuple[Any, dict[str, Any]]] = [
        (plain, {"group": GROUPS, "eval_group": [GROUPS[:9]], "eval_set": evaluation}),
        (plain, {"qid": QUERIES, "eval_qid": [QUERIES[:90]], "eval_set": evaluation}),
        (plain, {"qid": QUERIES, "eval_set": [(plain[:90], RELEVANCE[:90], QUERIES[:90])]}),
        (frame, {"eval_set": [(frame[:90], RELEVANCE[:90])]}),
    ]
    for rows, queries in forms:
        ours = PolytrainXGBRanker(scaling_config=HERE, **FEW, eval_metric="ndcg@4")
        ours.fit(rows, RELEVANCE, sample_weight=weights, **queries)
        np.testing.assert_allclose(ours.predict(rows), theirs.predict(plain), rtol=1e-4, atol=1e-5)
        [expected] = theirs.evals_result()["validation_0"].values()
        [found] = ours.evals_result()["validation_0"].values()
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    expected = xgboost.XGBRanker(**FEW, eval_metric="ndcg@4").fit(frame, RELEVANCE)
    ours = PolytrainXGBRanker(scaling_config=HERE, **FEW, eval_metric="ndcg@4")
    assert ours.fit(frame, RELEVANCE).score(frame, RELEVANCE) == pytest.approx(
        expected.score(frame, RELEVANCE), rel=1e-4
    )


def test_lightgbms_ranker_takes_queries_in_every_form() -> None:
    forms = [{"group": GROUPS}, {"qid": QUERIES}]
    for queries in forms:
        ours = PolytrainLGBMRanker(scaling_config=HERE, **FEW)
        ours.fit(
            *(X, RELEVANCE),
            eval_X=X[:90],
            eval_y=RELEVANCE[:90],
            eval_group=[GROUPS[:9]],
            eval_at=[2, 4],
            **queries,
        )
        assert set(ours.evals_result_["validation_0"]) == {"ndcg@2", "ndcg@4"}
        assert np.corrcoef(ours.predict(X), RELEVANCE)[0, 1] > 0.7


@pytest.mark.parametrize("cls", [PolytrainXGBRanker, PolytrainLGBMRanker])
def test_a_ranker_without_queries_says_how_to_pass_them(cls: Any) -> None:
    with pytest.raises(ValueError, match="group=") as raised:
        cls(scaling_config=HERE).fit(X, RELEVANCE)
    assert "qid=" in str(raised.value)
    with pytest.raises(ValueError, match="no queries"):
        cls(scaling_config=HERE).fit(X, RELEVANCE, qid=QUERIES, eval_set=[(X, RELEVANCE)])


def test_feature_weights_say_which_columns_are_drawn() -> None:
    """At the ends of what chance allows: XGBoost's own estimator draws by another generator."""
    options = {**FEW, "colsample_bytree": 0.25, "scaling_config": HERE}
    weights = [1e6, 1e-6, 1e-6, 1e-6]
    of_the_estimator = PolytrainXGBRegressor(**options, feature_weights=weights).fit(X, Y)
    of_fit = PolytrainXGBRegressor(**options).fit(X, Y, feature_weights=np.array(weights))
    for model in (of_the_estimator, of_fit):
        assert model.feature_importances_.tolist() == [1, 0, 0, 0]
    assert np.count_nonzero(PolytrainXGBRegressor(**options).fit(X, Y).feature_importances_) > 1
    for wrong in ([1, 2], [0, 1, 1, 1]):
        with pytest.raises(InvalidJobError, match="feature_weights"):
            PolytrainXGBRegressor(**options, feature_weights=wrong).fit(X, Y)


def test_rounds_are_printed_where_that_is_wanted(capfd: pytest.CaptureFixture[str]) -> None:
    for verbose, rounds in {False: [], True: range(8), 3: [0, 3, 6, 7]}.items():
        PolytrainXGBRegressor(**FEW, scaling_config=HERE).fit(X, Y, verbose=verbose, **EVAL)
        out, err = capfd.readouterr()
        printed = re.findall(r"\[(\d+)\]\t.*validation_0-rmse", out + err)
        assert [int(number) for number in printed] == list(rounds)


def test_categories_are_refused_where_they_are_turned_off() -> None:
    frame = FRAME.assign(e=np.array(["a", "b"])[(Y > 3).astype(int)])
    with pytest.raises(ValueError, match="'e' has categories"):
        PolytrainXGBRegressor(enable_categorical=False, scaling_config=HERE).fit(frame, Y)
    PolytrainXGBRegressor(enable_categorical=False, scaling_config=HERE, **FEW).fit(FRAME, Y)


@pytest.mark.parametrize("cls", [PolytrainXGBRegressor, PolytrainLGBMRegressor])
def test_columns_are_matched_by_name_or_by_position(cls: Any) -> None:
    model = cls(scaling_config=HERE, **FEW).fit(FRAME, Y)
    others = FRAME.set_axis(["p", "q", "r", "s"], axis=1)
    np.testing.assert_array_equal(
        model.predict(others, validate_features=False), model.predict(FRAME)
    )
    with pytest.raises(ValueError, match="feature names"):
        model.predict(others)


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
@pytest.mark.parametrize("cls", [PolytrainXGBRegressor, PolytrainLGBMRegressor])
def test_an_array_has_the_columns_of_the_frame_in_their_order(cls: Any, tmp_path: Path) -> None:
    spaced = FRAME.rename(columns=lambda name: f"column {name}")
    model = cls(scaling_config=HERE, **FEW).fit(spaced, Y, eval_set=[(spaced.to_numpy(), Y)])
    expected = model.predict(spaced)
    np.testing.assert_array_equal(model.predict(spaced.to_numpy()), expected)
    model.save_model(tmp_path / "model.json")
    loaded = cls().load_model(tmp_path / "model.json")
    np.testing.assert_array_equal(loaded.predict(spaced.to_numpy()), expected)
    with pytest.raises(ValueError, match=r"3 features, but .* expecting 4"):
        model.predict(spaced.to_numpy()[:, :3])


def test_rows_to_choose_bins_from_are_counted_by_lightgbms_name() -> None:
    few = PolytrainLGBMRegressor(scaling_config=HERE, **FEW, subsample_for_bin=30).fit(X, Y)
    assert few.result_.backend.bin_sample_rows == 30
    every = PolytrainLGBMRegressor(scaling_config=HERE, **FEW).fit(X, Y)
    assert few.predict(X).tolist() != every.predict(X).tolist()


def test_what_has_no_meaning_here_is_refused() -> None:
    lgbm = PolytrainLGBMRegressor(scaling_config=HERE, **FEW)
    with pytest.raises(ValueError, match="evals_result_"):
        lgbm.fit(X, Y, callbacks=[lightgbm.record_evaluation({})], **EVAL)
    with pytest.raises(ValueError, match="eval_names"):
        lgbm.fit(X, Y, eval_names=["train"], **EVAL)
    with pytest.raises(ValueError, match="eval_sample_weight has 2 entries"):
        lgbm.fit(X, Y, eval_sample_weight=[WEIGHTS, WEIGHTS], **EVAL)
    with pytest.raises(TypeError, match="no_such_thing"):
        lgbm.fit(X, Y).predict(X, no_such_thing=1)
    xgb = PolytrainXGBRegressor(scaling_config=HERE, **FEW)
    with pytest.raises(ValueError, match="base_margin"):
        xgb.fit(X, Y, base_margin=SCORES, **EVAL)
    with pytest.raises(ValueError, match="2 scores for each row"):
        xgb.fit(X, Y, base_margin=np.zeros((ROWS, 2)))


@pytest.mark.parametrize("cls", [PolytrainXGBRegressor, PolytrainLGBMRegressor])
def test_workers_get_the_functions_and_columns_of_the_keywords(cls: Any) -> None:
    """Functions are pickled, and columns are split, only with workers."""

    def squared(labels: Any, scores: Any, sample_weight: Any = None) -> Any:
        weight = np.ones_like(scores) if sample_weight is None else sample_weight
        return weight * (scores - labels), weight

    two = ScalingConfig(num_workers=2, cluster="local")
    options = {"objective": squared, **FEW}
    beside = {"sample_weight": WEIGHTS}
    here = cls(scaling_config=HERE, **options).fit(X, Y, **beside).predict(X)
    there = cls(scaling_config=two, **options).fit(X, Y, **beside).predict(X)
    np.testing.assert_allclose(there, here, rtol=1e-5)
