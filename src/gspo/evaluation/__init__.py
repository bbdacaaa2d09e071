"""How good is the policy on prompts it is not trained on?"""
