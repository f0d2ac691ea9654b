-- Around a script that only looks. Answers {sequence, reply}.
local reply = body()
return {num('sequence'), reply}
