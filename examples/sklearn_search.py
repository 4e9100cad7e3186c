"""Choose hyperparameters with scikit-learn: each model of the search trains on two workers.

pip install '.[xgboost-cpu]'
python examples/sklearn_search.py
"""

from __future__ import annotations

from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import GridSearchCV, train_test_split

from polytrain import ScalingConfig
from polytrain_xgboost.estimators import PolytrainXGBClassifier


def main() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, random_state=0)
    search = GridSearchCV(
        PolytrainXGBClassifier(n_estimators=20, scaling_config=ScalingConfig(num_workers=2)),
        {"max_depth": [1, 3]},
        cv=2,
        scoring="roc_auc",
    )
    search.fit(x, y)
    print(f"best: {search.best_params_}")
    print(f"accuracy on new rows: {search.best_estimator_.score(x_test, y_test):.3f}")


if __name__ == "__main__":
    main()
