"""Lists all parameters of LightGBM 4.6, with aliases, for the driver, which doesn't import it."""

from __future__ import annotations


def _names_in(text: str) -> dict[str, tuple[str, ...]]:
    found = (each.split() for each in text.split(","))
    return {name: tuple(aliases) for name, *aliases in found}


SWITCHES = _names_in(
    """
    bagging_by_query, boost_from_average, deterministic, enable_bundle bundle is_enable_bundle,
    extra_trees extra_tree, feature_pre_filter, first_metric_only, force_col_wise, force_row_wise,
    gpu_use_dp, header has_header, is_enable_sparse sparse is_sparse enable_sparse,
    is_provide_training_metric train_metric training_metric is_training_metric, is_unbalance
    unbalance unbalanced_sets, lambdarank_norm, linear_tree linear_trees, pre_partition
    is_pre_partition, precise_float_parser, pred_early_stop, predict_contrib contrib
    is_predict_contrib, predict_disable_shape_check, predict_leaf_index leaf_index
    is_predict_leaf_index, predict_raw_score raw_score predict_rawscore is_predict_raw_score,
    quant_train_renew_leaf, reg_sqrt, save_binary is_save_binary is_save_binary_file,
    stochastic_rounding, two_round two_round_loading use_two_round_loading, uniform_drop,
    use_missing, use_quantized_grad, xgboost_dart_mode, zero_as_missing
    """
)
"""Parameter that is true or false → its aliases."""

WHOLE = _names_in(
    """
    bagging_freq subsample_freq, bagging_seed bagging_fraction_seed, bin_construct_sample_cnt
    subsample_for_bin, data_random_seed data_seed, drop_seed, early_stopping_round early_stopping
    n_iter_no_change early_stopping_rounds, extra_seed, feature_fraction_seed, gpu_device_id,
    gpu_platform_id, lambdarank_truncation_level, local_listen_port port local_port, max_bin
    max_bins, max_cat_threshold, max_cat_to_onehot, max_depth, max_drop, metric_freq output_freq,
    min_data_in_bin, min_data_in_leaf min_data_per_leaf min_data min_child_samples min_samples_leaf,
    min_data_per_group, multi_error_top_k, num_class num_classes, num_gpu, num_grad_quant_bins,
    num_iteration_predict, num_iterations n_iter nrounds max_iter num_tree num_round num_trees
    num_rounds n_estimators num_iteration num_boost_round, num_leaves num_leaf max_leaves max_leaf
    max_leaf_nodes, num_machines num_machine, num_threads num_thread nthread nthreads n_jobs,
    objective_seed, pred_early_stop_freq, saved_feature_importance_type, seed random_seed
    random_state, snapshot_freq save_period, start_iteration_predict, time_out, top_k topk,
    verbosity verbose
    """
)
"""Parameter that is a whole number → its aliases."""

REAL = _names_in(
    """
    alpha, bagging_fraction sub_row subsample bagging, cat_l2, cat_smooth, cegb_penalty_split,
    cegb_tradeoff, drop_rate rate_drop, early_stopping_min_delta, fair_c, feature_fraction
    sub_feature colsample_bytree, feature_fraction_bynode sub_feature_bynode colsample_bynode,
    histogram_pool_size hist_pool_size, lambda_l1 reg_alpha l1_regularization, lambda_l2 reg_lambda
    lambda l2_regularization, lambdarank_position_bias_regularization, learning_rate shrinkage_rate
    eta, linear_lambda, max_delta_step max_tree_output max_leaf_output, min_gain_to_split
    min_split_gain, min_sum_hessian_in_leaf min_sum_hessian_per_leaf min_sum_hessian min_hessian
    min_child_weight, monotone_penalty monotone_splits_penalty ms_penalty mc_penalty,
    neg_bagging_fraction neg_sub_row neg_subsample neg_bagging, other_rate, path_smooth,
    poisson_max_delta_step, pos_bagging_fraction pos_sub_row pos_subsample pos_bagging,
    pred_early_stop_margin, refit_decay_rate, scale_pos_weight, sigmoid, skip_drop, top_rate,
    tweedie_variance_power
    """
)
"""Parameter that is a number → its aliases."""

_OTHERS = _names_in(
    """
    auc_mu_weights, boosting boosting_type boost, categorical_feature cat_column cat_feature
    categorical_column categorical_features, cegb_penalty_feature_coupled,
    cegb_penalty_feature_lazy, config config_file, convert_model convert_model_file,
    convert_model_language, data train train_data data_filename train_data_file,
    data_sample_strategy, device_type device, eval_at map_at ndcg_at map_eval_at ndcg_eval_at,
    feature_contri feature_contrib fc fp feature_penalty, forcedbins_filename, forcedsplits_filename
    fs forced_splits_filename forced_splits_file forced_splits, gpu_device_id_list, group_column
    group query group_id query_id query_column, ignore_column blacklist ignore_feature, input_model
    model_in model_input, interaction_constraints, label_column label, label_gain,
    machine_list_filename mlist machine_list machine_list_file, machines nodes workers,
    max_bin_by_feature, metric metrics metric_types, monotone_constraints mc monotone_constraint
    monotonic_cst, monotone_constraints_method monotone_constraining_method mc_method, objective
    objective_type app application loss, output_model model_out model_output, output_result
    name_pred pred_name predict_name predict_result prediction_name prediction_result,
    parser_config_file, task task_type, tree_learner tree tree_type tree_learner_type, valid test
    test_data valid_data test_data_file valid_data_file valid_filenames, weight_column weight
    """
)
"""Any other parameter → its aliases."""

ALIASES = {**SWITCHES, **WHOLE, **REAL, **_OTHERS}

COMMAND_LINE = {
    "task": ("what its command-line program does", "Leave it out"),
    "config": ("a file of its command-line program", "Pass its content as params"),
    "data": ("a file for its command-line program", "Pass datasets={'train': …}"),
    "valid": ("files for its command-line program", "Pass them as further datasets"),
    "output_model": (
        "a file that its command-line program writes",
        "Use result.load_model().save_model(path) after fit()",
    ),
    "input_model": ("a file for its command-line program", "Use the option init_model"),
    "snapshot_freq": (
        "how often its command-line program saves",
        "Use CheckpointConfig(checkpoint_frequency=…)",
    ),
    "save_binary": ("a file that its command-line program writes", "Leave it out"),
    "output_result": (
        "a file that its command-line program writes",
        "Use result.predict(…) after fit()",
    ),
    "convert_model": (
        "a file that its command-line program writes",
        "Leave it out",
    ),
    "label_column": ("a column for its command-line program", "Use the option label"),
    "weight_column": ("a column for its command-line program", "Use the option weight"),
    "group_column": ("a column for its command-line program", "Use the option group"),
    "ignore_column": (
        "columns for its command-line program",
        "Use DataConfig(columns=[…]) for the others",
    ),
}
"""Parameter → what it is, and what to do instead: training from Python ignores it."""
