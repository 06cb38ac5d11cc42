"""Reference minima of L1 logistic regression, by other solvers.

liblinear is used where scikit-learn is installed. SciPy's L-BFGS-B needs no more
packages, and many times as long on problems of many features.
"""

import importlib.util

import numpy as np
import scipy.optimize
import scipy.sparse as sp

from meshpar.methods.dbpg import proximal

LIBLINEAR, SCIPY = "liblinear", "SciPy"


def best_solver() -> str:
    """The solver to use: liblinear if there is one."""
    return LIBLINEAR if importlib.util.find_spec("sklearn") else SCIPY


def minimum(
    solver: str, rows: sp.csr_array, labels: np.ndarray, l1: float, tolerance: float
) -> float:
    """The objective that another solver reaches.

    Args:
      solver: "liblinear" or "SciPy".
      rows: float [rows, features].
      labels: 1 or -1, [rows].
      l1: weight of the sum of absolute weights beside the sum of the losses.
      tolerance: at which the solver stops, in its own terms.
    """
    labels = labels.astype(np.float64)
    solve = _liblinear if solver == LIBLINEAR else _scipy
    weights = solve(rows, labels, l1, tolerance)
    return proximal.objective(labels * (rows @ weights), weights, l1)


def _liblinear(
    rows: sp.csr_array, labels: np.ndarray, l1: float, tolerance: float
) -> np.ndarray:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(
        C=1 / l1,
        l1_ratio=1.0,
        fit_intercept=False,
        max_iter=1000,
        random_state=0,
        solver="liblinear",
        tol=tolerance,
    )
    matrix = sp.csr_matrix(rows, dtype=np.float64)
    matrix.indices = matrix.indices.astype(np.int32)  # It refuses longer ones.
    matrix.indptr = matrix.indptr.astype(np.int32)
    return np.ravel(model.fit(matrix, labels).coef_)


def _scipy(
    rows: sp.csr_array, labels: np.ndarray, l1: float, tolerance: float
) -> np.ndarray:
    # The weights are the difference of two vectors that are not negative, so that the
    # penalty is smooth. Features that occur nowhere stay at 0.
    num_features = rows.shape[1]
    used = np.flatnonzero(np.bincount(rows.indices, minlength=num_features))
    rows = rows[:, used].astype(np.float64)
    transposed = rows.T.tocsr()

    def value_and_gradient(both: np.ndarray) -> tuple[float, np.ndarray]:
        positive, negative = np.split(both, 2)
        margins = labels * (rows @ (positive - negative))
        chances = 1 / (1 + np.exp(np.clip(margins, -500, 500)))
        gradient = transposed @ (-labels * chances)
        value = np.logaddexp(0, -margins).sum() + l1 * both.sum()
        return value, np.concatenate([gradient + l1, l1 - gradient])

    found = scipy.optimize.minimize(
        value_and_gradient,
        np.zeros(2 * len(used)),
        jac=True,
        method="L-BFGS-B",
        bounds=scipy.optimize.Bounds(0, np.inf),
        options=dict(maxiter=10**5, maxfun=10**5, maxcor=20, ftol=tolerance, gtol=1e-9),
    )
    positive, negative = np.split(found.x, 2)
    weights = np.zeros(num_features)
    weights[used] = positive - negative
    return weights
