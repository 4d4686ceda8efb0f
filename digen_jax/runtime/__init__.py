"""Executes the scheduler's commands: thin code without policy.

    scheduler --command--> driver --(a thread for each mesh)--> executors --> jitted programs
        ^------event-------'

The path of a chunk, command by command (`executors.Executors.do` has them in this order):

    prompts --Encode--> conditioning --Generate--> trajectory --Decode--> images --Score--> rewards, advantages
                                                                    '--Deliver--> samples --Train--> gradient
    gradient --Update--> a new version of the weights --Publish--> sampling meshes

Each side owns what it holds. Everyone derives prompts, keys and draws from the config (`steps`). A sampling mesh has
its images (`sampling`), the trainer its samples (`training`) and the published weights (`versions`), the leader the
scores (`scores`). Arrays move between them by a link (`link`). `remote` has those of other processes.
"""
