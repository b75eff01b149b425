-- Sums of the ledger by UTC day and month, and by spend budget: cluster, pool/<name>, zone/<name>, project/<name>.
-- Updated in the same transaction as the ledger.
CREATE TABLE charged_periods (
    period TEXT NOT NULL,
    owner TEXT NOT NULL,
    micro_usd INTEGER NOT NULL,
    PRIMARY KEY (period, owner)
);

-- Earlier charges: spans are a minute long, so each counts in the period of its start.
INSERT INTO charged_periods (period, owner, micro_usd)
SELECT strftime('%Y-%m-%d', from_at / 1000000, 'unixepoch'), 'cluster', sum(total_micro_usd) FROM ledger GROUP BY 1;
INSERT INTO charged_periods (period, owner, micro_usd)
SELECT strftime('%Y-%m', from_at / 1000000, 'unixepoch'), 'cluster', sum(total_micro_usd) FROM ledger GROUP BY 1;
