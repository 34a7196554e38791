r"""One program on any mesh: on one device, on eight, on those of several processes.

`Run.mesh = @MeshShape()` splits a run among all devices that JAX sees, `data` ways
unless `MeshShape` says otherwise (`mesh`); `AxisRules` says which dimension of which
parameter goes to which of its axes (`rules`). The batches, the random numbers and so
the losses are those of one device.

**Several processes** each run the same command on the same config, and are told of each
other in one of two ways (`processes`):

- `--coordinator HOST:PORT --processes N --process I`: process 0 listens on a free port
  of its host, and every process is given its own number from 0;
- `--distributed`: JAX finds these out from what SLURM, Open MPI, Kubernetes or a TPU
  pod tells its tasks.

What the run reads (model, data, configs) must lie under the same paths for every
process, and `Run.directory` on a file system that all share: process 0 writes it, the
others read checkpoints there. Configs, command lines, examples and frozen parameters
are compared at the start; where they differ, each process says in what. Since each
reads its own parts of the parameters, some numbers of all of them are looked at beside.

*One machine with several GPUs* needs one process and no flag of these. One process for
each GPU, as some launchers want it, sees one each:

    for i in 0 1 2 3; do
      CUDA_VISIBLE_DEVICES=$i prompt-tuning train --gin_file run.gin \
        --gin.Run.mesh='@MeshShape()' \
        --coordinator localhost:4321 --processes 4 --process $i &
    done; wait

On one without GPUs the same loop with `JAX_NUM_CPU_DEVICES=1` tries out what follows.

*SLURM*: one task for each GPU (JAX gives each task the GPU of its local number) or one
for each node.

    #SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8
    #SBATCH --signal=TERM@120 --requeue
    srun prompt-tuning train --gin_file run.gin \
      --gin.Run.mesh='@MeshShape()' --distributed

`--signal` has the run save and end two minutes before its time is up; submitted again,
the same job goes on from there, on another number of nodes too.

*TPU VMs*: the same command on every host of the slice, as `gcloud compute tpus tpu-vm
ssh NAME --worker=all --command=...` does.

    prompt-tuning train --gin_file run.gin --gin.Run.mesh='@MeshShape()' --distributed

*GKE*: an indexed Job, or a JobSet, whose pods run that command. Where JAX is not told
what it needs to find out by itself, the index is the number:

    --coordinator $JOB-0.$SERVICE:4321 --processes $PODS --process $JOB_COMPLETION_INDEX

**How it ends.** SIGTERM or SIGINT to any one process stops all after the same step,
which is saved. Where a process dies, or is not heard of for `--silence` seconds (25),
the others end soon after with a message that names it, and an exit code that is not 0;
the same command, on any number of processes, goes on from the last checkpoint (`watch`,
`last_words`).

**What moves between devices**: the trained parameters' gradient once a step over `data`
and `fsdp`; over `fsdp` each block's weights as well, forward and again backward, for
every micro-batch; over `tensor` two sums in each block, forward and backward, which
want the fastest links: let it divide the number of devices of a host, whose devices
then stand next to each other along it.
"""
