"""Options of the command line about data: files, their form, and what is learned."""

from prompt_tuning.config.flat_option import DATA, FlatOption, in_group

DATA_OPTIONS = in_group(
    DATA,
    FlatOption(
        "train",
        "training data: files (jsonl, json, csv, tsv, parquet, HDF5), globs or folders",
        "train/DataSource.files",
        kind=list,
        macro="TRAIN_FILES",
        metavar="FILE",
    ),
    FlatOption(
        "eval",
        "held-out data: files (jsonl, json, csv, tsv, parquet, HDF5), globs or folders",
        "evaluation/DataSource.files",
        kind=list,
        macro="EVALUATION_FILES",
        default="no evaluation",
        metavar="FILE",
    ),
    FlatOption(
        "format",
        "format of the lines; auto recognizes it by their keys",
        "DataSource.format",
    ),
    FlatOption(
        "chat", "render pairs with the model's chat template, too", "DataSource.chat"
    ),
    FlatOption(
        "chat_template",
        "file with a chat template to use instead",
        "DataSource.chat_template",
        metavar="FILE",
    ),
    FlatOption(
        "chat_date",
        "date for a chat template that uses the current date",
        "DataSource.chat_date",
        metavar="DAY",
    ),
    FlatOption(
        "chat_template_kwargs",
        "variables of the chat template, as JSON: '{\"enable_thinking\": false}'",
        "DataSource.chat_template_kwargs",
        kind=dict,
        metavar="JSON",
    ),
    FlatOption(
        "turns",
        "learn all answers of a conversation in one example (together), or each in its "
        "own (apart); auto: together if the chat template only ever appends text",
        "DataSource.turns",
    ),
    FlatOption(
        "prompt_key",
        "key or column of the input",
        "DataSource.prompt_key",
        metavar="KEY",
    ),
    FlatOption(
        "completion_key",
        "key or column of the text to learn",
        "DataSource.completion_key",
        metavar="KEY",
    ),
    FlatOption(
        "joiner",
        "text between an input and the text to learn, e.g. a space",
        "DataSource.joiner",
        metavar="TEXT",
    ),
    FlatOption(
        "template",
        "template of each prompt with text, keys and vectors, e.g. '{soft:20} Review: "
        "{text} Mood:'",
        "DataSource.template",
        macro="TEMPLATE",
    ),
    FlatOption(
        "prompt_id_key",
        "key or column of an example's task, for multitask methods",
        "DataSource.prompt_id_key",
        macro="PROMPT_ID_KEY",
        metavar="KEY",
    ),
    FlatOption(
        "on_too_long",
        "what to do with examples longer than the model's positions: stop, skip them, "
        "or cut their beginning (truncate, truncate_left) or their end",
        "DataSource.on_too_long",
    ),
    FlatOption(
        "use_token_type_ids",
        "learn by token types, and refuse data without them; if not given, types are "
        "used if the data has them, else every token is learned",
        "DataSource.use_token_type_ids",
    ),
    FlatOption(
        "prompt_loss_weight",
        "loss weight of prompt tokens (type 0) relative to completion tokens",
        "DataSource.prompt_loss_weight",
        metavar="WEIGHT",
    ),
    FlatOption(
        "on_nothing_learned",
        "what to do with rows without a learned token: stop, or skip and count them",
        "DataSource.on_nothing_learned",
    ),
    FlatOption(
        "max_examples",
        "use the first N examples of each data set",
        "DataSource.maximum_examples",
        default="all",
    ),
)
