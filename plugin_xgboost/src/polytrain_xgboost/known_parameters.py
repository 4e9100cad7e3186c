"""Lists XGBoost's parameters, with aliases, for the driver, which doesn't import XGBoost."""

from __future__ import annotations

KNOWN_PARAMETERS = (
    *("aft_loss_distribution", "aft_loss_distribution_scale", "alpha", "base_score"),
    *("boost_from_average", "booster", "colsample_bylevel", "colsample_bynode"),
    *("colsample_bytree", "debug_synchronize", "default_direction", "device"),
    *("disable_default_eval_metric", "eta", "eval_metric", "expectile_alpha"),
    *("extmem_single_page", "fail_on_invalid_gpu_id", "feature_selector", "gamma", "gpu_id"),
    *("grow_policy", "huber_slope", "interaction_constraints", "lambda"),
    *("lambdarank_bias_norm", "lambdarank_diff_normalization", "lambdarank_normalization"),
    *("lambdarank_num_pair_per_sample", "lambdarank_pair_method"),
    *("lambdarank_score_normalization", "lambdarank_unbiased", "learning_rate", "max_bin"),
    *("max_cached_hist_node", "max_cat_threshold", "max_cat_to_onehot", "max_delta_step"),
    *("max_depth", "max_leaves", "max_row_perbatch", "min_child_weight", "min_split_loss"),
    *("monotone_constraints", "multi_strategy", "n_jobs", "ndcg_exp_gain", "normalize_type"),
    *("nthread", "num_class", "num_parallel_tree", "num_target", "objective", "one_drop"),
    *("opt_dense_col", "predictor", "process_type", "quantile_alpha", "random_state"),
    *("rate_drop", "refresh_leaf", "reg_alpha", "reg_lambda", "sample_type", "sampling_method"),
    *("scale_pos_weight", "seed", "seed_per_iteration", "single_precision_histogram"),
    *("sketch_eps", "skip_drop", "sparse_threshold", "subsample", "tolerance", "top_k"),
    *("tree_method", "tweedie_variance_power", "updater", "use_rmm", "validate_parameters"),
    "verbosity",
)
"""Names in XGBoost's documentation and in a booster's configuration, up to version 3.2."""
