"""Accuracy of linear classifiers of digits, from features of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.axes
import numpy as np

from experiments.gallery.digits import Digits

CLASSIFIERS = RIDGE, LOGISTIC = "ridge", "logistic regression"

_PARTS = 5
"""Of the cross-validation."""

Accuracies = Mapping[str, Mapping[str, Sequence[float]]]
"""{classifier: {kind of features: share that is right, by seed}}."""


def accuracy(
    name: str, training: Digits, groups: np.ndarray, held_out: Digits
) -> float:
    """Share of held-out digits that a linear classifier gets right.

    Its penalty is chosen by cross-validation on the training digits.

    Args:
      name: of the classifier, in `CLASSIFIERS`.
      training: features and classes.
      groups: digits of one group are in the same part of the cross-validation, [rows].
      held_out: features and classes.
    """
    from sklearn.model_selection import GridSearchCV, GroupKFold

    search = GridSearchCV(*_classifier(name), cv=GroupKFold(_PARTS))
    search.fit(training.x, training.y, groups=groups)
    return float(search.score(held_out.x, held_out.y))


def _classifier(name: str) -> tuple[Any, dict[str, Sequence[float]]]:
    """(linear classifier, penalties to choose from)."""
    from sklearn.linear_model import LogisticRegression, RidgeClassifier

    if name == RIDGE:
        return RidgeClassifier(), {"alpha": [0.1, 1, 10, 100, 1000]}
    return LogisticRegression(max_iter=2000), {"C": [0.003, 0.03, 0.3, 3]}


def bars(axes: matplotlib.axes.Axes, accuracies: Accuracies) -> None:
    """Mean and deviation of each kind's accuracies, a bar for each classifier."""
    height = 0.8 / len(accuracies)
    for index, (name, by_kind) in enumerate(accuracies.items()):
        places = np.arange(len(by_kind)) + index * height
        means, deviations = (
            [statistic(x) for x in by_kind.values()] for statistic in (np.mean, np.std)
        )
        axes.barh(places, means, height, xerr=deviations, label=name)
        axes.set_yticks(places - index * height / 2, by_kind)
    axes.invert_yaxis()
    axes.set(xlabel="accuracy of a linear classifier", xlim=(0.5, 1))
    axes.legend(fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
