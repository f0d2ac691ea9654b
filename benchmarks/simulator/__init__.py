"""The whole control plane under a virtual clock, with faults, thousands of lives a minute: `python -m benchmarks.simulator --seeds 20000`.

What runs is what the service runs, as far as it is pure: `buffer.ledger.PureLedger` behind one server, `weightsync.reconcile.Core` in every engine host,
`producer.routing.Routing` in every producer. What is not pure is modelled: the scripts of the weight channel (`channel`), the order in which processes wait,
write and ask (`producers`, `engines`, `trainers`), the disk (`disk`), the network and the server's clock (`kernel`, `server`). A seed decides the settings
(`scenario`) and what goes wrong (`faults`); the rest follows, so a seed is a run.

    kernel     virtual time; threads that may be killed, or hang, wherever they wait; messages that are lost, late, twice, or whose answer is lost
    server     one call at a time; pauses, clock jumps, lost payloads, a fall back to an older copy of itself
    judge      what is true: who wrote which token, what the weights have learnt; it never asks the ledger
    world      starts and ends processes; mischief makes the faults happen
    watch      what must hold of slots, engines and processes, and of every group at the end
    shrink     the fewest faults that still break a failing seed

After every event, and at the end of a run, it holds that
    I1  every group is in one state, counters equal what they count, no slot is kept for a process that does not hold it; at the end every group is trained,
        dead or outstanding, and ledger, weights and witness file agree on which
    I2  no group is in two chunks, and none has an effect twice on the weights that survive, judged by the weights themselves
    I3  no token over K enters a loss, by the weights that wrote it, not by what its version says; with D = 0 all were written by the weights they train
    I4  once faults end, steps are trained within bounded time, and the run comes to its end; otherwise who waits for what is printed
    I5  bytes stay within the budget
    and of the channel: every accepted token was written by the version it names, an engine never goes back within an incarnation, nothing is deleted while
    it is loaded, no more engines are paused than may be, only what took a version is routable.

Every rule has a switch (`scenario.ALL_RULES`), and tests/simulator shows for each that the simulator notices when it is off.

A worked trace, `--without floor` (rule T5: a checkpoint frees only what the oldest kept one covers), cut down to two faults of eleven:

     0.92  fault: resume older trainer           the next trainer will go back to the older of the two checkpoints
    14.58  trainer  checkpoint 18 registered     kept are 15 and 18; without the rule everything up to step 18 is freed now
    14.75  trainer.1 is killed
    16.02  trainer  attach 15                    steps 16 to 18 should come again: their journal is gone
    16.10  trainer  lease (16, 0)                takes groups 35 and 39 instead, and the six of the lost steps never have an effect
    I2: the weights learnt from 32 groups, the ledger says 38

Not modelled: requests that survive the fall of the server they were sent to (its connections end with it), two servers that both take writes, the scripts of
the ledger cut in the middle, and what the network may do to the scripts that give a pause back (`resumed`, `ack`): coming late and again, they let one engine
more pause than may be.
"""
